"""Plays each run of the fault suite once, for the first test that looks at it.

Under pytest-xdist one run goes on per worker; tests that share runs share a worker (tests/conftest.py).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from launcher.soak import play_chain
from launcher.trial import Trial
from tests.faults.harness import Scenario, Soak, environment, play

Results = Callable[[Scenario], list[Trial]]
Soaked = Callable[[Soak], list[dict[str, Any]]]

# The longest run, and any other that the same test looks at.
TEST_SECONDS = 1200
FOLDER = Path(__file__).parent


def runs_of(item: pytest.Item) -> list[Scenario | Soak]:
    """The runs that a test looks at."""
    values = item.callspec.params.values() if isinstance(item, pytest.Function) and hasattr(item, "callspec") else ()
    return [value for value in values if isinstance(value, Scenario | Soak)]


def length(item: pytest.Item) -> int:
    """Starts and rounds that a test may have to play."""
    return sum(len(run.starts) if isinstance(run, Scenario) else len(run.numbers) for run in runs_of(item))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest runs come first, so that no worker is left alone with one at the end."""
    of_faults = [item for item in items if item.path.parent == FOLDER]
    for item in of_faults:
        item.add_marker(pytest.mark.timeout(TEST_SECONDS))
    items[:] = sorted(of_faults, key=length, reverse=True) + [item for item in items if item not in of_faults]


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers use: the chats, and what the launcher keeps between runs."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "fault-suite"
    folder.mkdir(exist_ok=True)
    with FileLock(folder / "lock"):
        if not (chats := folder / "chats.jsonl").exists():
            write_chats(chats)
    return folder


def write_chats(path: Path) -> None:
    """Twenty short chats: fewer rows than some runs have micro-batches, so that epochs end in the middle of steps."""
    with path.open("w") as file:
        for number in range(20):
            answer = " ".join(str(number + step) for step in range(20))
            turns = [("user", f"Count from {number}."), ("assistant", answer)]
            file.write(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}) + "\n")


@pytest.fixture(scope="session")
def results(shared: Path) -> Results:
    return functools.cache(lambda scenario: play(scenario, shared, shared / "cache", shared / "chats.jsonl"))


@pytest.fixture(scope="session")
def soaked(shared: Path) -> Soaked:
    return functools.cache(
        lambda rounds: play_chain(
            rounds.numbers, rounds.seed, shared / f"soak-{rounds.numbers.start}", environment(shared / "cache")
        )
    )
