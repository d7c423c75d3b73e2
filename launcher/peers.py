"""What a rank knows of the others: who has reported, the last heartbeats, whose process lives. No torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.members import START, START_LOG, STATES, Beat, Member, failure_of_peer, is_stopped, lost_at_start, watches
from launcher.outcome import Failure
from launcher.processes import describe_exit, is_alive, read_process
from launcher.siblings import find_siblings
from launcher.topology import Role

if TYPE_CHECKING:
    from launcher.control import Control

# If this rank itself did not run for so long (a paused machine), it has no right to call others silent.
OWN_PAUSE_SECONDS = 5.0
# Between two looks for ranks of this node that have a process and have not reported.
LOOK_SECONDS = 1.0


@dataclass
class Peer:
    """A member under watch. `pidfd` becomes readable the moment the process ends, before torchrun reaps it."""

    member: Member
    reported: bool = True
    """Else a process of this node that will be that rank."""
    pidfd: int | None = None
    gone: bool = False
    sequence: int = 0
    changed: float = 0.0


@dataclass
class PeerTable:
    """All members of the run, and the watched ones among them."""

    me: Member
    roles: Sequence[Role]
    members: dict[int, Member] = field(default_factory=dict)
    """Those that have reported."""
    watched: dict[int, Peer] = field(default_factory=dict)
    _refreshed: float | None = None
    _first: float = 0.0
    _looked: float | None = None

    def descriptors(self) -> list[int]:
        """Descriptors that become readable when a watched process ends."""
        return [peer.pidfd for peer in self.watched.values() if peer.pidfd is not None and not peer.gone]

    def member(self, rank: int) -> Member:
        """A rank, whether it has reported or not."""
        if rank == self.me.rank:
            return self.me
        if rank in self.members:
            return self.members[rank]
        return self.watched[rank].member if rank in self.watched else self._unreported(rank)

    def refresh(self, control: Control, now: float) -> None:
        """Meet new members and take in the latest heartbeats."""
        for role in self._silent_roles():
            if (entry := control.get(f"member/{role.rank}")) is not None:
                self._meet(Member(**entry), now)
        self._look_for_unreported(now)
        paused = self._refreshed is not None and now - self._refreshed > OWN_PAUSE_SECONDS
        self._refreshed = now
        for peer in self.watched.values():
            entry = None if peer.gone else control.get(f"beat/{peer.member.rank}")
            if entry is not None and entry["sequence"] != peer.sequence:
                peer.sequence, peer.changed = entry["sequence"], now
            elif paused or not (peer.reported or is_stopped(peer.member)):  # imports may take long
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
                if not peer.reported:
                    return lost_at_start(member, status)
                phase, step = control.get(f"phase/{member.rank}") or START
                return failure_of_peer(member, phase, step, "PeerLost", describe_exit(status, Path(member.log)))
        return None

    def find_silent(self, control: Control, now: float, limit: float) -> Failure | None:
        """A watched rank whose heartbeat has not changed for `limit` seconds and that has not said goodbye."""
        for peer in self.watched.values():
            if peer.gone or now - peer.changed <= limit or control.get(f"left/{peer.member.rank}") is not None:
                continue
            process = read_process(peer.member.pid) if peer.member.node == self.me.node else None
            state = STATES.get(process.state, "something in it keeps the GIL") if process else "its node may be down"
            reason = f"no heartbeat for {limit:.0f} s: {state}"
            phase, step = control.get(f"phase/{peer.member.rank}") or START
            return failure_of_peer(peer.member, phase, step, "PeerSilent", reason)
        return None

    def is_mute(self, rank: int, limit: float) -> bool:
        """Whether this is a rank of this node, still there, that does not end by itself: without a heartbeat for
        `limit` seconds, or without one ever."""
        peer = self.watched.get(rank)
        if peer is None or peer.gone or peer.member.node != self.me.node or self._refreshed is None:
            return False
        return not peer.reported or self._refreshed - peer.changed >= limit

    def beats(self, control: Control, now: float) -> list[Beat]:
        """The last heartbeat of every other rank that has not left; made up for those that have not reported."""
        present = [rank for rank in self.members if control.get(f"left/{rank}") is None]
        entries = [control.get(f"beat/{rank}") for rank in present]
        unreported = [
            Beat(role.rank, self.member(role.rank).role, 0, *START, waiting=False, seconds=now - self._first)
            for role in self._silent_roles()
        ]
        return [Beat(**entry) for entry in entries if entry is not None] + unreported

    def training(self, control: Control) -> tuple[str, int] | None:
        """Phase and step of the drafter of this node that is furthest behind; None where none has told."""
        drafters = [role.rank for role in self.roles if role.name == "drafter" and role.node == self.me.node]
        places = [tuple(place) for rank in drafters if (place := control.get(f"phase/{rank}")) is not None]
        return min(places, key=lambda place: place[1], default=None)

    def lost_before_report(self, ranks: frozenset[int], control: Control) -> Failure | None:
        """The failure of the first of these ranks, whose processes are gone, that has not said goodbye."""
        lost = [rank for rank in sorted(ranks) if control.get(f"left/{rank}") is None]
        return lost_at_start(self.member(lost[0]), None) if lost else None

    def close(self) -> None:
        for peer in self.watched.values():
            if peer.pidfd is not None:
                os.close(peer.pidfd)

    def _silent_roles(self) -> list[Role]:
        """Who has not reported."""
        return [role for role in self.roles if role.rank != self.me.rank and role.rank not in self.members]

    def _unreported(self, rank: int, pid: int = 0, start_ticks: int = 0) -> Member:
        """Its words, if any, are where those of all ranks of the node go until they have a log."""
        role, log = self.roles[rank], Path(self.me.log).parent / START_LOG
        return Member.unreported(role, str(log) if log.is_file() else "", pid, start_ticks)

    def _look_for_unreported(self, now: float) -> None:
        """Watch the processes of this node that are yet to report, so that none is lost unnamed meanwhile."""
        missing = {role.rank for role in self._silent_roles() if role.node == self.me.node} - self.watched.keys()
        if not missing or (self._looked is not None and now - self._looked < LOOK_SECONDS):
            return
        self._first, self._looked = self._first or now, now
        for rank, pid in find_siblings().pids.items():
            process = read_process(pid) if rank in missing else None
            if process is not None:
                self._watch(self._unreported(rank, pid, process.start_ticks), False, now)

    def _meet(self, member: Member, now: float) -> None:
        self.members[member.rank] = member
        known = self.watched.get(member.rank)
        if known is not None and (known.member.pid, known.member.start_ticks) == (member.pid, member.start_ticks):
            known.member, known.reported, known.changed = member, True, now
        elif watches(self.me, member):
            self._watch(member, True, now)

    def _watch(self, member: Member, reported: bool, now: float) -> None:
        peer = Peer(member, reported, changed=now)
        if member.node == self.me.node:
            try:
                peer.pidfd = os.pidfd_open(member.pid)
            except OSError:
                # Gone already, or a kernel without pidfds: the look into /proc at every tick finds it.
                peer.pidfd = None
        self.watched[member.rank] = peer
