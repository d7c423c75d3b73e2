"""Which tests share a worker of pytest-xdist; `./launch.sh test` starts three."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

FAULTS, GPU = "tests/faults/", "tests/gpu/"


def places_of_one_worker(nodeids: Iterable[str]) -> frozenset[str]:
    """Files of the fault suite where tests have the same parameters, and so look at the same runs of the launcher;
    tests that want all GPUs of the machine. The node ids are all that the scheduler knows of its tests."""
    split = [nodeid.partition("::")[::2] for nodeid in nodeids if nodeid.startswith(FAULTS)]
    looks = Counter((file, test.partition("[")[2]) for file, test in split if "[" in test)
    return frozenset({file for (file, _), count in looks.items() if count > 1} | {GPU})


def worker_scope(nodeid: str, places: frozenset[str]) -> str:
    """What goes to one worker as a whole: one of the places, or else the test alone."""
    return next((place for place in places if nodeid.startswith(place)), nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Tests one by one to whichever worker is free, but for those that belong together.

    Groups by mark (`--dist loadgroup`) would do, but xdist 3.8 does not see them under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        @cached_property
        def _places(self) -> frozenset[str]:
            assert self.collection is not None
            return places_of_one_worker(self.collection)

        def _split_scope(self, nodeid: str) -> str:
            return worker_scope(nodeid, self._places)

    return Scheduling(config, log)
