"""Who the other ranks are: members, their heartbeats, and the failures that are found in their stead. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import ExitCode
from launcher.fallback_status import own_lines
from launcher.outcome import Failure
from launcher.processes import describe_exit, kill_process, read_process
from launcher.topology import Role

STATES = {"T": "it is stopped (SIGSTOP)", "D": "it is stuck in the kernel", "Z": "it is dead"}
START = ("start", 0)
# Of launch.sh, in the folder of the ranks' logs: what they say before they have one.
START_LOG = "torchrun.log"
CODES = {code.value for code in ExitCode} - {ExitCode.FINISHED}


@dataclass(frozen=True)
class Beat:
    """One heartbeat; `waiting` is whether the rank waits for others, `seconds` how long it is in its phase.

    `sequence` 0 stands for a rank that has not reported.
    """

    rank: int
    role: str
    sequence: int
    phase: str
    step: int
    waiting: bool
    seconds: float

    @property
    def reported(self) -> bool:
        return self.sequence > 0

    def __str__(self) -> str:
        doing = "waits" if self.waiting else "works"
        return f"rank {self.rank} {self.role} {doing} in phase {self.phase} for {self.seconds:.0f} s, step {self.step}"


@dataclass(frozen=True)
class Member:
    """Who a rank is and which process it runs in; published once as `member/RANK`."""

    rank: int
    role: str
    node: int
    local_rank: int
    pid: int
    start_ticks: int
    log: str

    @classmethod
    def this_process(cls, role: Role, log: str) -> Member:
        process = read_process(os.getpid())
        assert process is not None
        name = f"{role.name} {role.index}"
        return cls(role.rank, name, role.node, role.local_rank, os.getpid(), process.start_ticks, log)

    @classmethod
    def unreported(cls, role: Role, log: str, pid: int = 0, start_ticks: int = 0) -> Member:
        """A rank that has not said who it is; without a pid where no process of it is known."""
        return cls(role.rank, f"{role.name} {role.index}", role.node, role.local_rank, pid, start_ticks, log)

    def kill(self) -> None:
        if self.pid:
            kill_process(self.pid, self.start_ticks)


def watches(me: Member, other: Member) -> bool:
    """Every rank watches its own node; the first rank of a node also watches those of the other nodes."""
    if other.node == me.node:
        return other.rank != me.rank
    return me.local_rank == 0 and other.local_rank == 0


def is_stopped(member: Member) -> bool:
    process = read_process(member.pid)
    return process is not None and process.state == "T"


def last_words(member: Member) -> str:
    """Where a rank that has no log yet says what it has to say."""
    return f"{START_LOG} beside the logs of the others" if member.log else "the console of its node"


def lost_at_start(member: Member, wait_status: int | None) -> Failure:
    """The failure of a rank that ended before it reported; with its own code if it left with one of ours.

    Args:
        wait_status: None where its parent was faster.
    """
    code = ExitCode.RETRY
    if wait_status is None:
        how = "is gone (killed, or it could not start)"
    elif not os.WIFEXITED(wait_status):
        how = describe_exit(wait_status, Path(member.log or os.devnull))
    else:
        left_with = os.waitstatus_to_exitcode(wait_status)
        code = ExitCode(left_with) if left_with in CODES else ExitCode.UNCLASSIFIED
        how = f"left with exit code {left_with}"
    reason = f"{how}, before it reported -> see {last_words(member)}"
    killed = wait_status is not None and os.WIFSIGNALED(wait_status)
    if member.log and not killed and (said := own_lines(Path(member.log))):
        reason += f", where the last words are: {said[-1]}"  # the others have logs of their own
    return Failure(member.rank, member.role, *START, int(code), "PeerLost", reason, member.log)


def failure_of_peer(member: Member, phase: str, step: int, error: str, reason: str) -> Failure:
    return Failure(member.rank, member.role, phase, step, int(ExitCode.RETRY), error, reason, member.log)
