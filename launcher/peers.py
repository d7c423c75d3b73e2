"""What a rank knows of the others: who they are, their last heartbeat, whether their process lives. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.errors import ExitCode
from launcher.outcome import Failure
from launcher.processes import describe_exit, is_alive, kill_process, read_process
from launcher.topology import Role

if TYPE_CHECKING:
    from launcher.control import Control

# If this rank itself did not run for so long (a paused machine), it has no right to call others silent.
OWN_PAUSE_SECONDS = 5.0
STATES = {"T": "it is stopped (SIGSTOP)", "D": "it is stuck in the kernel", "Z": "it is dead"}


@dataclass(frozen=True)
class Beat:
    """One heartbeat; `waiting` is whether the rank waits for others, `seconds` how long it is in its phase."""

    rank: int
    role: str
    sequence: int
    phase: str
    step: int
    waiting: bool
    seconds: float

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

    def kill(self) -> None:
        kill_process(self.pid, self.start_ticks)


@dataclass
class Peer:
    """A member under watch. `pidfd` becomes readable the moment the process ends, before torchrun reaps it."""

    member: Member
    pidfd: int | None = None
    gone: bool = False
    sequence: int = 0
    changed: float = 0.0


def watches(me: Member, other: Member) -> bool:
    """Every rank watches its own node; the first rank of a node also watches those of the other nodes."""
    if other.node == me.node:
        return other.rank != me.rank
    return me.local_rank == 0 and other.local_rank == 0


@dataclass
class PeerTable:
    """All members of the run, and the watched ones among them."""

    me: Member
    world_size: int
    members: dict[int, Member] = field(default_factory=dict)
    watched: dict[int, Peer] = field(default_factory=dict)
    _refreshed: float | None = None

    def descriptors(self) -> list[int]:
        """Descriptors that become readable when a watched process ends."""
        return [peer.pidfd for peer in self.watched.values() if peer.pidfd is not None and not peer.gone]

    def member(self, rank: int) -> Member:
        return self.me if rank == self.me.rank else self.members[rank]

    def refresh(self, control: Control, now: float) -> None:
        """Meet new members and take in the latest heartbeats."""
        for rank in set(range(self.world_size)) - {self.me.rank} - set(self.members):
            if (entry := control.get(f"member/{rank}")) is not None:
                self._meet(Member(**entry), now)
        paused = self._refreshed is not None and now - self._refreshed > OWN_PAUSE_SECONDS
        self._refreshed = now
        for peer in self.watched.values():
            entry = None if peer.gone else control.get(f"beat/{peer.member.rank}")
            if entry is not None and entry["sequence"] != peer.sequence:
                peer.sequence, peer.changed = entry["sequence"], now
            elif paused:
                peer.changed = now

    def find_gone(self, control: Control) -> Failure | None:
        """A watched process of this node that ended without having said so."""
        for peer in self.watched.values():
            member = peer.member
            if peer.gone or member.node != self.me.node or is_alive(member.pid, member.start_ticks):
                continue
            peer.gone = True
            process = read_process(member.pid)
            same = process is not None and process.start_ticks == member.start_ticks
            if control.get(f"left/{member.rank}") is None:
                status = process.exit_status if process is not None and same else None
                phase, step = control.get(f"phase/{member.rank}") or ("start", 0)
                return _failure(member, phase, step, "PeerLost", describe_exit(status, Path(member.log)))
        return None

    def find_silent(self, control: Control, now: float, limit: float) -> Failure | None:
        """A watched rank whose heartbeat has not changed for `limit` seconds and that has not said goodbye."""
        for peer in self.watched.values():
            if peer.gone or now - peer.changed <= limit or control.get(f"left/{peer.member.rank}") is not None:
                continue
            process = read_process(peer.member.pid) if peer.member.node == self.me.node else None
            state = STATES.get(process.state, "something in it keeps the GIL") if process else "its node may be down"
            reason = f"no heartbeat for {limit:.0f} s: {state}"
            phase, step = control.get(f"phase/{peer.member.rank}") or ("start", 0)
            return _failure(peer.member, phase, step, "PeerSilent", reason)
        return None

    def is_mute(self, rank: int, limit: float) -> bool:
        """Whether this is a rank of this node, still there but without a heartbeat for `limit` seconds."""
        peer = self.watched.get(rank)
        if peer is None or peer.gone or peer.member.node != self.me.node or self._refreshed is None:
            return False
        return self._refreshed - peer.changed >= limit

    def beats(self, control: Control) -> list[Beat]:
        """The last heartbeat of every other member that has not left."""
        present = [rank for rank in self.members if control.get(f"left/{rank}") is None]
        entries = [control.get(f"beat/{rank}") for rank in present]
        return [Beat(**entry) for entry in entries if entry is not None]

    def count_left_on_node(self, control: Control) -> int:
        """Members of this node that said goodbye."""
        local = [rank for rank, member in self.members.items() if member.node == self.me.node]
        return sum(control.get(f"left/{rank}") is not None for rank in local)

    def close(self) -> None:
        for peer in self.watched.values():
            if peer.pidfd is not None:
                os.close(peer.pidfd)

    def _meet(self, member: Member, now: float) -> None:
        self.members[member.rank] = member
        if not watches(self.me, member):
            return
        peer = Peer(member, changed=now)
        if member.node == self.me.node:
            try:
                peer.pidfd = os.pidfd_open(member.pid)
            except OSError:
                # Gone already, or a kernel without pidfds: the look into /proc at every tick finds it.
                peer.pidfd = None
        self.watched[member.rank] = peer


def _failure(member: Member, phase: str, step: int, error: str, reason: str) -> Failure:
    return Failure(member.rank, member.role, phase, step, int(ExitCode.RETRY), error, reason, member.log)
