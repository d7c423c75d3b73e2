"""The planned faults and when they strike."""

from __future__ import annotations

import pytest

from launcher import faults
from launcher.errors import UserError
from launcher.faults import Fault, parse_faults


def test_the_grammar() -> None:
    assert parse_faults("kill@step:3:1") == (Fault("kill", "step", 3, 1),)
    assert parse_faults("slow=0.5@turn:2; nan@step:4:*") == (
        Fault("slow", "turn", None, 2, 0.5),
        Fault("nan", "step", 4, None),
    )
    assert parse_faults("diskfull@save-shard:1") == (Fault("diskfull", "save-shard", None, 1),)
    assert parse_faults("") == ()


@pytest.mark.parametrize("text", ["boom@step:1", "kill", "kill@step", "kill@step:x", "slow=@turn:1"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="not a fault"):
        parse_faults(text)


def test_when_a_fault_strikes() -> None:
    once, always = Fault("kill", "step", 3, 1), Fault("kill", "init", None, 1)
    assert once.strikes("step", 3, 1)
    assert not once.strikes("step", 2, 1) and not once.strikes("step", 3, 0) and not once.strikes("save", 3, 1)
    assert not once.strikes("step", 3, 1, restarts=1), "a restart gets past a fault with a step"
    assert always.strikes("init", 0, 1, restarts=1)
    assert Fault("nan", "step", 4, None).strikes("step", 4, 7)


def test_trip_raises_only_where_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.trip("step", 3)
    monkeypatch.setattr(faults, "_TEXT", "raise@step:3:1;nan@step:2:1")
    monkeypatch.setenv("RANK", "1")
    faults.trip("step", 2)
    assert faults.armed("nan", "step", 2) and not faults.armed("nan", "step", 3)
    with pytest.raises(RuntimeError, match="injected"):
        faults.trip("step", 3)


@pytest.mark.parametrize(("kind", "error"), [("oom", "out of memory"), ("diskfull", "No space left")])
def test_resource_faults(monkeypatch: pytest.MonkeyPatch, kind: str, error: str) -> None:
    monkeypatch.setattr(faults, "_TEXT", f"{kind}@step:0")
    monkeypatch.setenv("RANK", "0")
    with pytest.raises((RuntimeError, OSError), match=error):
        faults.trip("step", 1)
