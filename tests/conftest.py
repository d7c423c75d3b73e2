"""Starts the fault suite's runs beside the other tests, which keep one core busy at most; its own tests come last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from launcher.soak import play_chain
from tests.faults.harness import Scenario, Soak, environment, play

# A start is half imports, half waits; more of them beside the other tests would starve two cores.
AT_ONCE = 2
WHOLE_SUITE_SECONDS = 1200
FAULTS = Path(__file__).parent / "faults"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The first test to look at a result waits for everything that is played before it."""
    of_faults = [item for item in items if item.path.parent == FAULTS]
    for item in of_faults:
        item.add_marker(pytest.mark.timeout(WHOLE_SUITE_SECONDS))
    items[:] = [item for item in items if item.path.parent != FAULTS] + of_faults


def write_chats(path: Path) -> Path:
    """Twenty short chats: fewer rows than some runs have micro-batches, so that epochs end in the middle of steps."""
    with path.open("w") as file:
        for number in range(20):
            answer = " ".join(str(number + step) for step in range(20))
            turns = [("user", f"Count from {number}."), ("assistant", answer)]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")
    return path


@pytest.fixture(scope="session", autouse=True)
def played(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Scenario | Soak, Future[Any]]]:
    """The runs of all collected scenarios, under way from the first test on."""
    wanted = {
        value
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        for value in item.callspec.params.values()
        if isinstance(value, Scenario | Soak)
    }
    folder, cache = tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("cache")
    chats = write_chats(folder / "chats.jsonl")

    def run(job: Scenario | Soak) -> Any:
        if isinstance(job, Scenario):
            return play(job, folder, cache, chats)
        return play_chain(job.numbers, job.seed, folder / f"soak-{job.numbers.start}", environment(cache))

    pool = ThreadPoolExecutor(AT_ONCE)
    # The longest first, so that none of them runs alone at the end.
    yield {job: pool.submit(run, job) for job in sorted(wanted, key=_length, reverse=True)}
    pool.shutdown(cancel_futures=True)


def _length(job: Scenario | Soak) -> int:
    return len(job.starts) if isinstance(job, Scenario) else len(job.numbers)
