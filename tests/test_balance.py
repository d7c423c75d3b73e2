"""The better split, for every number of ranks, and what a run says about its own."""

from __future__ import annotations

import itertools

import pytest

from launcher.balance import WARM_UP_STEPS, Balance, Rates, best_split, explain_choice, is_clearly_better, judge
from launcher.balance import possible_splits as splits
from launcher.topology import Split

PAIRS = [Rates(*pair) for pair in itertools.product((0.001, 0.035, 0.1, 3.0), (0.001, 0.118, 0.1, 3.0))]


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", range(2, 18))
def test_possible_splits_are_all_of_them(ranks: int, tp: int) -> None:
    found = splits(ranks, tp)
    every = [(t, d) for t, d in itertools.product(range(1, ranks + 1), range(1, ranks + 1)) if t * tp + d == ranks]
    assert sorted((split.targets, split.drafters) for split in found) == sorted(every)
    assert all(split.ranks == ranks and split.target_tp == tp for split in found)


@pytest.mark.parametrize("rates", PAIRS, ids=str)
@pytest.mark.parametrize("ranks", range(2, 18))
def test_no_split_beats_the_best(ranks: int, rates: Rates) -> None:
    best = best_split(ranks, rates)
    for split in splits(ranks):
        assert rates.rows_per_second(split) <= rates.rows_per_second(best)
        if rates.rows_per_second(split) == rates.rows_per_second(best):
            assert split.drafters >= best.drafters, "of equals the smaller batch"


def test_too_few_ranks_have_no_split() -> None:
    with pytest.raises(ValueError, match="empty"):
        best_split(2, Rates(1, 1), target_tp=2)


def test_the_choice_is_explained_by_numbers() -> None:
    rates = Rates(0.035, 0.118)
    best = best_split(8, rates)
    assert str(best) == "2t+6d"
    line = "target 35 ms/row, drafter 118 ms/row: 2t+6d gives 50.8 rows/s"
    assert explain_choice(best, Split(5, 3), rates) == f"{line}, 5t+3d would give 25.4"
    assert explain_choice(best, best, rates) == line
    assert explain_choice(Split(1, 1), Split(1, 1), Rates(2, 1.5)).startswith("target 2 s/row, drafter 1.5 s/row")


def test_a_small_gain_is_no_reason_to_change() -> None:
    rates = Rates(0.1, 0.1)
    assert is_clearly_better(Split(4, 4), Split(5, 3), rates)
    assert not is_clearly_better(Split(4, 4), Split(4, 4), rates)
    assert not is_clearly_better(Split(11, 10), Split(11, 10), rates)
    assert not is_clearly_better(Split(10, 10), Split(11, 9), Rates(0.1, 0.095))


@pytest.mark.parametrize(
    ("split", "rates", "side", "advice"),
    [
        (Split(5, 3), Rates(0.035, 0.118), "the drafters were", "2t+6d would give 50.8 rows/s instead of 25.4"),
        (Split(2, 6), Rates(0.2, 0.1), "the targets were", "5t+3d would give 25 rows/s instead of 10"),
        (Split(1, 1), Rates(0.1, 0.131), "the drafters were", "no other split of 2 ranks is clearly better than 1t+1d"),
        (Split(4, 4), Rates(0.1, 0.101), "neither side was", "no other split of 8 ranks"),
    ],
)
def test_the_verdict(split: Split, rates: Rates, side: str, advice: str) -> None:
    verdict = judge(split, rates, drafter_wait=0.01, target_wait=0.5)
    assert verdict.startswith(f"{side} the bottleneck (drafters waited 1% of the time, targets 50%; {rates}); {advice}")


def lap(target: float, drafter: float) -> dict[str, float]:
    return {"target_row_seconds": target, "drafter_row_seconds": drafter, "data_wait": 0.0, "target_wait": 0.5}


def test_a_run_is_judged_by_its_medians_after_the_first_steps() -> None:
    balance = Balance(Split(5, 3))
    assert balance.verdict() is None
    for _ in range(WARM_UP_STEPS):
        balance.add(lap(90.0, 90.0))
    assert balance.rates() is None
    for target in (0.03, 0.04, 7.0):
        balance.add(lap(target, 0.12))
    assert balance.rates() == Rates(0.04, 0.12) and balance.steps == 3
    verdict = balance.verdict()
    assert verdict is not None and "--topology.targets=2 --topology.drafters=6" in verdict
