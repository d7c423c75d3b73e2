"""Whom to blame for a phase that took too long, and what to say. No torch, no threads."""

from __future__ import annotations

from launcher.errors import DeadlineError, ExitCode
from launcher.members import Beat, Member, last_words
from launcher.outcome import Failure
from launcher.rank_state import Phase

PHASE_OPTIONS = {"turn": "compile.turn_timeout"}


def option_of(phase: Phase) -> str:
    """The option that holds the deadline of a phase."""
    return phase.option or PHASE_OPTIONS.get(phase.name, f"runtime.{phase.name}_timeout")


def blame(own: Beat, others: list[Beat]) -> Beat:
    """Whom to name when `own` runs out of time: itself if it works, else the working rank that is furthest behind."""
    working = [beat for beat in others if not beat.waiting]
    if not own.waiting or not working:
        return own
    return min(working, key=lambda beat: (beat.step, -beat.seconds))


def overdue(phase: Phase, own: Beat, culprit: Beat, member: Member, waiting_for: str | None) -> Failure:
    """The failure of a phase whose deadline has passed.

    Args:
        own: the rank that noticed.
        culprit: the rank to blame, whose `member` is given.
        waiting_for: what `own` waits for.
    """
    reason = f"phase {phase.name} took longer than {phase.timeout:.0f} s"
    if culprit is not own:
        reason += f" on rank {own.rank} {own.role}, which waits; {_keeps_waiting(culprit)}"
    elif waiting_for:
        reason += f", waiting for {waiting_for}"
    reason += f" -> see {_where(culprit, member)}; if it is only slow, raise {option_of(phase)}"
    return Failure(
        member.rank, member.role, culprit.phase, culprit.step, ExitCode.RETRY, "DeadlineError", reason, member.log
    )


def overwaited(error: DeadlineError, own: Beat, culprit: Beat, member: Member) -> Failure:
    """The failure of a wait that has run out, as `overdue`."""
    reason = str(error)
    if culprit is not own:
        where = "its log" if culprit.reported else _where(culprit, member)
        reason = f"rank {own.rank} {own.role} {error.what}; {_keeps_waiting(culprit)} -> see {where}"
    return Failure(
        member.rank, member.role, culprit.phase, culprit.step, ExitCode.RETRY, "DeadlineError", reason, member.log
    )


def _keeps_waiting(culprit: Beat) -> str:
    return f"rank {culprit.rank}{'' if culprit.reported else ', which has not reported yet,'} keeps it waiting"


def _where(culprit: Beat, member: Member) -> str:
    """Where to look: the stacks of a rank without a log are nowhere."""
    return "the stacks in its log" if culprit.reported else last_words(member)
