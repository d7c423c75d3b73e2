"""Which tests share a worker of pytest-xdist; `./launch.sh test` starts three."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from xdist.scheduler import LoadScopeScheduling

# Files whose tests look at the same runs of the launcher, and tests that want all GPUs of the machine.
TOGETHER = (
    "tests/faults/test_resume.py",
    "tests/faults/test_shared_target.py",
    "tests/faults/test_stops.py",
    "tests/gpu/",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Tests one by one to whichever worker is free, but for those that belong together.

    Groups by mark (`--dist loadgroup`) would do, but xdist 3.8 does not see them under pytest 9.2.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return next((place for place in TOGETHER if nodeid.startswith(place)), nodeid)

    return Scheduling(config, log)
