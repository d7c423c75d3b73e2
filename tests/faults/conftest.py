"""Plays all collected scenarios and soak rounds in a small pool; `results` and `soaked` give those of one test."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher.soak import play_chain
from launcher.trial import Trial
from tests.faults.harness import Scenario, environment, play

# More than a small machine has cores: a start is half imports, half waits.
AT_ONCE = 4
WHOLE_SUITE_SECONDS = 1200


@dataclass(frozen=True)
class Soak:
    """Consecutive rounds of a soak, on one run folder."""

    seed: int
    numbers: range

    def __str__(self) -> str:
        return f"rounds {self.numbers.start}-{self.numbers.stop - 1}"


Results = Callable[[Scenario], list[Trial]]
Soaked = Callable[[Soak], list[dict[str, Any]]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test to look at a result waits for everything that is played before it."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(WHOLE_SUITE_SECONDS))


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty short chats: fewer rows than some runs have micro-batches, so that epochs end in the middle of steps."""
    path = tmp_path_factory.mktemp("data") / "chats.jsonl"
    with path.open("w") as file:
        for number in range(20):
            answer = " ".join(str(number + step) for step in range(20))
            turns = [("user", f"Count from {number}."), ("assistant", answer)]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    return path


@pytest.fixture(scope="session")
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, chats: Path
) -> Iterator[dict[Scenario | Soak, Future[Any]]]:
    wanted = {
        value
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        for value in item.callspec.params.values()
        if isinstance(value, Scenario | Soak)
    }
    folder, cache = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cache")

    def run(job: Scenario | Soak) -> Any:
        if isinstance(job, Scenario):
            return play(job, folder, cache, chats)
        return play_chain(job.numbers, job.seed, folder / f"soak-{job.numbers.start}", environment(cache), math.inf)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        # The longest first, so that none of them runs alone at the end.
        yield {job: pool.submit(run, job) for job in sorted(wanted, key=_length, reverse=True)}


@pytest.fixture(scope="session")
def results(played: dict[Scenario | Soak, Future[Any]]) -> Results:
    return lambda scenario: played[scenario].result()


@pytest.fixture(scope="session")
def soaked(played: dict[Scenario | Soak, Future[Any]]) -> Soaked:
    return lambda rounds: played[rounds].result()


def _length(job: Scenario | Soak) -> int:
    return len(job.starts) if isinstance(job, Scenario) else len(job.numbers)
