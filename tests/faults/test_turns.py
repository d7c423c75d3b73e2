"""Turns at the gate through the real launcher: their order, what they prove, and how one that fails ends them all."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest

from launcher.cache_files import read_manifest
from launcher.config_sections import DEMO_CHATS
from launcher.trial import Trial
from tests.faults.conftest import Results
from tests.faults.harness import FAILURE_SECONDS, Scenario, Start, check, check_logs, ends_within

# Rank 0 is the target, the others are drafters.
DRY = ("--dry-run",)
GROUP_SECONDS, TURN_SECONDS = 30, 5


def turns_of(scenario: Scenario, results: Results) -> list[dict[str, Any]]:
    (result,) = results(scenario)
    check(result, "finished", 0)
    return json.loads((result.run_dir / "compile_report.json").read_text())["turns"]


def compile_cache(run_dir: Path) -> Path:
    (manifest,) = (run_dir.parent / "compile").glob("*/manifest.json")
    return manifest.parent


def leave_unlisted(run_dir: Path) -> None:
    """What a run compiled that was killed in its gate."""
    kernel = compile_cache(run_dir) / "triton/kernel"
    kernel.write_bytes(b"code")
    os.utime(kernel, (0, 0))


COMPILED = Scenario(
    "compiled turns",
    (Start("", (f"--data.path={DEMO_CHATS}", "--data.row_length=256"), split=(1, 2), compiled=True),),
)
SLOW_LEADER = Scenario(
    "slow leader",
    (
        Start(
            f"slow={GROUP_SECONDS + 2}@turn:1;slow=6@turn:2;slow=6@turn:3",
            (*DRY, "--compile.turns=leader_first", f"--runtime.init_timeout={GROUP_SECONDS}"),
            split=(1, 3),
        ),
    ),
)
# Of three drafters one has had its turn and one waits for it when the second raises. A hang counts from its deadline.
RAISES = Scenario("raise in turn", (Start("raise@turn:2", DRY, ends_within(), split=(1, 3)),))
HANGS = Scenario(
    "hang in turn",
    (
        Start(
            "hang@turn:1", (*DRY, f"--compile.turn_timeout={TURN_SECONDS}"), ends_within(TURN_SECONDS + FAILURE_SECONDS)
        ),
    ),
)
# Rank 0 lists the files of its node's compile cache; the second start is killed once it has.
KILLED = Scenario(
    "killed in a turn and after the gate",
    (
        Start("kill@turn:1", DRY, ends_within(), split=(1, 2)),
        Start("slow=5@step:1:0;kill@step:2:0", before=leave_unlisted),
    ),
)
# What fails, with which code, rank and words; and the error as every log has it.
FAILURES = [
    (RAISES, 1, 2, ("drafter 1 turn",), "injected error in phase turn"),
    (KILLED, 75, 1, ("drafter 0 turn", "out of memory"), "was killed by SIGKILL"),
    (HANGS, 75, 1, ("drafter 0 turn", "compile.turn_timeout"), "phase turn took longer than 5 s"),
]


def check_listed(killed: Trial) -> None:
    """A run that is killed has listed what its gate compiled."""
    check(killed, "failed", 75, ("0 target",))
    assert "compile cache" not in killed.console
    assert set(read_manifest(compile_cache(killed.run_dir)).files) == {"triton/kernel"}


@pytest.mark.parametrize("scenario", [COMPILED], ids=str)
def test_ranks_compile_in_order_and_training_on_mixed_lengths_compiles_nothing(
    results: Results, scenario: Scenario
) -> None:
    turns = turns_of(scenario, results)
    assert [turn["rank"] for turn in turns] == [1, 2]
    assert all(turn["verified"] and turn["proof"]["graph_breaks"] == 0 for turn in turns)
    assert all(a["end"] <= b["start"] for a, b in itertools.pairwise(turns))
    first, *followers = turns
    assert first["cache_misses"] > 0
    assert all(turn["cache_misses"] == 0 and turn["cache_hits"] > 0 for turn in followers)
    (result,) = results(scenario)
    assert len(result.metrics) == 6 and ", 0 recompiles; " in result.status.reason


@pytest.mark.parametrize("scenario", [SLOW_LEADER], ids=str)
def test_the_leader_may_outlast_the_timeout_of_process_groups_and_the_others_go_together(
    results: Results, scenario: Scenario
) -> None:
    leader, second, third = turns_of(scenario, results)
    assert leader["seconds"] > GROUP_SECONDS
    assert leader["end"] <= min(second["start"], third["start"])
    assert second["start"] < third["end"] and third["start"] < second["end"]


@pytest.mark.parametrize(("scenario", "code", "rank", "words", "error"), FAILURES, ids=["raise", "kill", "hang"])
def test_a_turn_that_fails_ends_every_rank_soon_and_each_log_names_it(
    results: Results, scenario: Scenario, code: int, rank: int, words: tuple[str, ...], error: str
) -> None:
    result, *later = results(scenario)
    check(result, "failed", code, (f"{rank} ", error, *words))
    check_logs(result, rank, error, silent=scenario is KILLED)
    assert result.console.count("run failed") == 1
    if scenario is HANGS:
        assert "in _strike" in result.logs, "the stack of the hang is in the rank's log"
    if scenario is KILLED:
        (killed,) = later
        check_listed(killed)
