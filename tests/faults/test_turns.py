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
from launcher.trial import Running
from tests.faults.conftest import Results
from tests.faults.harness import Scenario, Start, check

# Rank 0 is the target, the others are drafters.
DRY = ("--dry-run",)
FAILURE_SECONDS = 15.0
GROUP_SECONDS = 30


def ends_soon(running: Running) -> None:
    """From the fault on; a run that takes longer counts as one that never ends."""
    running.process.wait(FAILURE_SECONDS)


def turns_of(scenario: Scenario, results: Results) -> list[dict[str, Any]]:
    (result,) = results(scenario)
    check(result, "finished", 0)
    return json.loads((result.run_dir / "compile_report.json").read_text())["turns"]


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
# Another waits for its turn when this one raises; `segfault in turn` and `hang in turn` are elsewhere.
RAISES = Scenario("raise in turn", (Start("raise@turn:2", DRY, ends_soon, split=(1, 3)),))


def compile_cache(run_dir: Path) -> Path:
    (manifest,) = (run_dir.parent / "compile").glob("*/manifest.json")
    return manifest.parent


def leave_unlisted(run_dir: Path) -> None:
    """What a run compiled that was killed in its gate."""
    kernel = compile_cache(run_dir) / "triton/kernel"
    kernel.write_bytes(b"code")
    os.utime(kernel, (0, 0))


# Rank 0 lists the files of its node's compile cache; a later start is killed once it has.
KILLED = Scenario(
    "killed after the gate",
    (Start("", DRY), Start("slow=5@step:1:0;kill@step:2:0", before=leave_unlisted)),
)


@pytest.mark.parametrize("scenario", [KILLED], ids=str)
def test_a_run_that_is_killed_has_listed_what_its_gate_compiled(results: Results, scenario: Scenario) -> None:
    _, killed = results(scenario)
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


@pytest.mark.parametrize("scenario", [RAISES], ids=str)
def test_a_turn_that_fails_ends_every_rank_soon_and_each_log_names_it(results: Results, scenario: Scenario) -> None:
    (result,) = results(scenario)
    check(result, "failed", 1, ("2 drafter 1 turn", "injected error"))
    logs = {path.stem: path.read_text() for path in result.run_dir.glob("attempts/1/rank_*.log")}
    others = [text for name, text in logs.items() if name != "rank_2"]
    assert len(others) == 3 and all("rank 2" in text and "injected error" in text for text in others), logs
