"""Plays all collected scenarios in a small pool; `results` gives those of one test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from launcher.trial import Trial
from tests.faults.harness import Scenario, play

AT_ONCE = 3
WHOLE_SUITE_SECONDS = 1200
Results = Callable[[Scenario], list[Trial]]


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
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, chats: Path) -> Iterator[Results]:
    scenarios = {
        value
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        for value in item.callspec.params.values()
        if isinstance(value, Scenario)
    }
    folder, cache = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cache")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        # The longest first, so that none of them runs alone at the end.
        order = sorted(scenarios, key=lambda scenario: -len(scenario.starts))
        futures: dict[Scenario, Future[list[Trial]]] = {
            scenario: pool.submit(play, scenario, folder, cache, chats) for scenario in order
        }
        yield lambda scenario: futures[scenario].result()
