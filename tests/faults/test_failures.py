"""Ranks that raise, die or run out of something: who is named, with which code, and that nobody is left."""

from __future__ import annotations

import pytest

from tests.faults.conftest import Results
from tests.faults.harness import FAILURE_SECONDS, Scenario, Start, check, ends_within


def _one(name: str, fault: str, *flags: str) -> Scenario:
    return Scenario(name, (Start(fault, flags, ends_within()),))


# A fault whose place does not matter strikes in init, before most of the imports. A kill in a turn is in test_turns, in
# a save in test_resume; a segfault in a step, and more in other phases, in test_soak.
# Rank 0 is the target, rank 1 a drafter. Steps count from 0.
FAILURES = [
    (_one("target raises", "raise@step:3:0"), 1, ("0 target 0 step", "injected error")),
    (
        _one("out of memory", "oom@init:1"),
        75,
        ("1 drafter 0 init", "out of memory", "lower train.anchors or data.row_length"),
    ),
    # A drafter raises, having seen the wrong header.
    (_one("wrong header", "header@step:2:0"), 1, ("1 drafter 0 step", "row_length is -1, expected 64")),
    (
        _one("nan", "nan@step:*", "--train.max_bad_steps=1"),
        1,
        ("1 drafter 0", "rank 1 drafter 0 on row", "chats.jsonl:", "not finite at step 2", "lower train.lr"),
    ),
]


# Before a rank has a log, but late enough for the others to catch signals. The stopped one is given up when it has been
# silent for `runtime.heartbeat_timeout`.
LATE_SECONDS, SILENT_SECONDS = 6, 10


def _early(name: str, fault: str, rank: int, seconds: int, *flags: str) -> Scenario:
    start = Start(
        f"slow={LATE_SECONDS}@start:{rank};{fault}@start:{rank}", flags, ends_within(seconds + FAILURE_SECONDS)
    )
    return Scenario(name, (start,))


EARLY = [
    (_early("killed at the start", "kill", 1, LATE_SECONDS), ("1 drafter 0 start", "before it reported")),
    (
        _early(
            "stopped at the start",
            "stop",
            1,
            LATE_SECONDS + SILENT_SECONDS,
            f"--runtime.heartbeat_timeout={SILENT_SECONDS}",
        ),
        ("1 drafter 0 start", "SIGSTOP"),
    ),
    (_early("first rank killed at the start", "kill", 0, LATE_SECONDS), ("start rank 0 was killed by SIGKILL",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "words"), EARLY, ids=lambda value: str(value))
def test_a_rank_that_is_lost_before_it_reports_is_named(
    results: Results, scenario: Scenario, words: tuple[str, ...]
) -> None:
    (result,) = results(scenario)
    check(result, "failed", 75, words)
    assert result.console.count("run failed") == 1
    assert result.status.log is not None and result.status.log.endswith("torchrun.log")


@pytest.mark.parametrize(("scenario", "code", "words"), FAILURES, ids=lambda value: str(value))
def test_a_failure_names_its_cause_and_ends_every_rank(
    results: Results, scenario: Scenario, code: int, words: tuple[str, ...]
) -> None:
    (result,) = results(scenario)
    check(result, "failed", code, words)
    assert result.console.count("run failed") == 1
    assert result.status.log is not None and "rank_" in result.status.log
    if scenario.name == "wrong header":
        assert "Traceback" in result.logs and "HeaderMismatch" in result.logs
    if scenario.name == "out of memory":
        assert "of host memory" in result.logs, "who has how much"
    if scenario.name == "nan":
        assert "step 1 skipped: the loss of rank 1 drafter 0 on row" in result.console


# Drafters and targets pass over steps 2 and 4 alike, evaluate step 6 and end together.
EXPORTS = Scenario(
    "no room for two exports",
    (
        Start(
            "diskfull@export:2:1;diskfull@export:4:1",
            ("--eval.prompts=1", "--eval.every=2", "--eval.max_new_tokens=4"),
            split=(1, 2),
        ),
    ),
)


@pytest.mark.parametrize("scenario", [EXPORTS], ids=str)
def test_a_disk_without_room_for_exports_costs_their_evaluations(results: Results, scenario: Scenario) -> None:
    (result,) = results(scenario)
    check(result, "finished", 0)
    assert [step for step in range(7) if f"step {step} is not evaluated" in result.console] == [2, 4]
    assert result.console.count("is not evaluated") == 2, "one rank says it"
    assert [entry["step"] for entry in result.metrics if "eval_acceptance_length" in entry] == [0, 6]
    assert [path.name for path in (result.run_dir / "export").glob("step-*")] == ["step-6"]
