"""A rank that stops making progress: it is named, its stacks are kept, and nobody waits for torchrun.

A hang in a turn is in test_turns; SIGSTOP and a held GIL are among the rounds of test_soak.
"""

from __future__ import annotations

import pytest

from tests.faults.conftest import Results
from tests.faults.harness import FAILURE_SECONDS, Scenario, Start, check, check_logs, ends_within

STEP_SECONDS = 8
HANG = Scenario(
    "hang in step",
    (Start("hang@step:2:1", (f"--runtime.step_timeout={STEP_SECONDS}",), ends_within(STEP_SECONDS + FAILURE_SECONDS)),),
)


@pytest.mark.parametrize("scenario", [HANG], ids=str)
def test_a_rank_that_hangs_is_named_soon_after_its_deadline(results: Results, scenario: Scenario) -> None:
    (result,) = results(scenario)
    check(result, "failed", 75, ("1 drafter 0 step", "longer than 8 s", "runtime.step_timeout"))
    check_logs(result, 1, "phase step took longer than 8 s")
    assert "in _strike" in result.logs, "the stack of the hang is in the rank's log"
