"""What the fault suite's runs came to; they are started in tests/conftest.py."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from launcher.trial import Trial
from tests.faults.harness import Scenario, Soak

Results = Callable[[Scenario], list[Trial]]
Soaked = Callable[[Soak], list[dict[str, Any]]]


@pytest.fixture
def results(played: dict[Scenario | Soak, Future[Any]]) -> Results:
    return lambda scenario: played[scenario].result()


@pytest.fixture
def soaked(played: dict[Scenario | Soak, Future[Any]]) -> Soaked:
    return lambda rounds: played[rounds].result()
