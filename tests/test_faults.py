"""The planned faults, when they strike, and that none of them is planned in vain."""

from __future__ import annotations

import ast
import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from launcher import faults
from launcher.checkpoint import Checkpointer
from launcher.checkpoint_folder import checkpoints_of, find_checkpoint
from launcher.cli import parse
from launcher.config_sections import CheckpointConfig
from launcher.errors import ConfigError, UserError
from launcher.faults import ACTIVE, EARLY_PHASES, FOREVER, PASSIVE, STEP_PHASES, Fault, parse_faults
from tests.sharded_trainer import wait
from tests.small_caches import filled, make_config, start
from tests.training import make_batch

LAUNCHER = Path(faults.__file__).parent


def plan(monkeypatch: pytest.MonkeyPatch, text: str, rank: int = 0) -> None:
    """As if LAUNCHER_FAULT had been set when this rank started."""
    monkeypatch.setattr(faults, "_TEXT", text)
    monkeypatch.setenv("RANK", str(rank))


def test_the_grammar() -> None:
    assert parse_faults("kill@step:3:1") == (Fault("kill", "step", 3, 1),)
    assert parse_faults("slow=0.5@turn:2; nan@step:4:*") == (
        Fault("slow", "turn", None, 2, 0.5),
        Fault("nan", "step", 4, None),
    )
    assert parse_faults("diskfull@save-shard:1") == (Fault("diskfull", "save-shard", None, 1),)
    assert parse_faults("") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        *(
            (text, "not a fault -> give")
            for text in ("boom@step:1", "kill", "kill@step", "kill@step:x", "slow=@turn:1")
        ),
        ("nan@save:4:1", "nan strikes nobody in the phase save -> give step"),
        ("cache@init:0", "cache strikes nobody in the phase init -> give start"),
        ("shard@save-shard:4:1", "shard strikes nobody in the phase save-shard -> give save"),
        ("kill@traning:1", "kill strikes nobody in the phase traning -> give start or init"),
        ("kill@turn:3:1", "the phase turn comes before all steps"),
    ],
)
def test_what_can_never_strike_is_refused_with_one_line(monkeypatch: pytest.MonkeyPatch, text: str, said: str) -> None:
    with pytest.raises(UserError, match=f"^LAUNCHER_FAULT={text}: {said}"):
        parse_faults(text)
    plan(monkeypatch, text)
    with pytest.raises(ConfigError) as refused:
        parse(["--preset=tiny"])
    assert refused.value.code == 78 and len(refused.value.problems) == 1


def test_when_a_fault_strikes() -> None:
    once, always = Fault("kill", "step", 3, 1), Fault("kill", "init", None, 1)
    assert once.strikes("step", 3, 1)
    assert not once.strikes("step", 2, 1) and not once.strikes("step", 3, 0) and not once.strikes("save", 3, 1)
    assert not once.strikes("step", 3, 1, restarts=1), "a restart gets past a fault with a step"
    assert always.strikes("init", 0, 1, restarts=1)
    assert Fault("nan", "step", 4, None).strikes("step", 4, 7)
    first = Fault("kill", "start", 0, 1)
    assert first.strikes("start", None, 1) and not first.strikes("start", None, 1, restarts=1)


def test_trip_raises_only_where_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    faults.trip("step", 3)
    plan(monkeypatch, "raise@step:3:1;nan@step:2:1", rank=1)
    faults.trip("step", 2)
    assert faults.armed("nan", "step", 2) and not faults.armed("nan", "step", 3)
    with pytest.raises(RuntimeError, match="injected"):
        faults.trip("step", 3)


def test_every_phase_that_may_be_named_is_come_to_and_no_other() -> None:
    """By the sources: a phase that is renamed would leave its faults without a place."""
    calls = [
        (call.func.attr, [argument.value for argument in call.args if isinstance(argument, ast.Constant)])
        for path in LAUNCHER.glob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
    ]
    calls += [("armed", [kind, phase]) for kind, phase in PASSIVE.items()]
    place = {"phase": 0, "trip": 0, "armed": 1}
    named = {words[place[name]] for name, words in calls if name in place and len(words) > place[name]}
    assert named == {*EARLY_PHASES, *STEP_PHASES}


ACTIONS = {
    "raise": "RuntimeError injected error in phase step",
    "kill": f"kill {os.getpid()} {signal.SIGKILL:d}",
    "stop": f"kill {os.getpid()} {signal.SIGSTOP:d}",
    "segv": "read 0",
    "abort": "abort",
    "hang": f"sleep {FOREVER}",
    "gil": f"sleep with the GIL {FOREVER}",
    "slow": "sleep 5.0",
    "oom": "OutOfMemoryError CUDA out of memory (injected)",
    "diskfull": "OSError [Errno 28] No space left on device (injected)",
}


@pytest.mark.parametrize("kind", ACTIVE)
def test_every_active_kind_acts(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    done: list[str] = []
    plan(monkeypatch, f"{kind}@step:0")
    with monkeypatch.context() as patch:
        patch.setattr(os, "kill", lambda pid, number: done.append(f"kill {pid} {number:d}"))
        patch.setattr(os, "abort", lambda: done.append("abort"))
        patch.setattr(time, "sleep", lambda seconds: done.append(f"sleep {seconds}"))
        patch.setattr(ctypes, "string_at", lambda address: done.append(f"read {address}"))
        sleep = SimpleNamespace(sleep=lambda seconds: done.append(f"sleep with the GIL {seconds}"))
        patch.setattr(ctypes, "PyDLL", lambda name: sleep)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        try:
            faults.trip("step", 1)
        except (RuntimeError, OSError) as error:
            done.append(f"{type(error).__name__} {error}")
    assert done == [ACTIONS[kind]]


def _spoils_features(folder: Path) -> None:
    features = torch.zeros(3)
    faults.spoil_features(features, 4)
    assert features.isnan().all()


def _spoils_the_header(folder: Path) -> None:
    assert faults.spoil_header({"row_length": 64, "step": 4}, 4) == {"row_length": -1, "step": 4}


def _spoils_the_shape(folder: Path) -> None:
    whole = make_batch(0)
    assert len(faults.spoil_shape(whole, 4).ids) == len(whole.ids) - 1


def _spoils_the_checkpoint(folder: Path) -> None:
    """The next start goes on from the one before."""
    checkpointer = Checkpointer(folder, CheckpointConfig(asynchronous=False), None, wait, 30.0)
    for step in (2, 4):
        checkpointer.save(step, {"weight": torch.ones(300)}, {}, required=True)
    found = find_checkpoint(folder, "auto")
    assert found.path == checkpoints_of(folder) / "step-2"
    assert "step-4: __0_0.distcp has" in found.notices[0] and "written were" in found.notices[0]


def _spoils_the_cache(folder: Path) -> None:
    """One line with the path, and a private cold cache."""
    cache = start(make_config(folder / "caches"), folder)
    (notice,) = cache.notices
    assert (
        cache.private and f"compile cache {folder / 'caches'}/" in notice and "has 250 bytes instead of 500" in notice
    )
    cache.close()


def _spoils_an_empty_cache(folder: Path) -> None:
    """Nothing was compiled yet: there is the manifest alone."""
    cache = start(make_config(folder / "caches"), folder)
    (notice,) = cache.notices
    assert cache.private and "manifest.json is damaged" in notice
    cache.close()


SPOILS: list[tuple[str, Callable[[Path], None]]] = [
    ("nan@step:4:0", _spoils_features),
    ("header@step:4:0", _spoils_the_header),
    ("recompile@step:4:0", _spoils_the_shape),
    ("shard@save:4:0", _spoils_the_checkpoint),
    ("cache@start:0", _spoils_the_cache),
    ("cache@start:0", _spoils_an_empty_cache),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("fault", "act"), SPOILS)
def test_every_passive_kind_acts(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    fault: str,
    act: Callable[[Path], None],
) -> None:
    if act is _spoils_the_cache:
        filled(make_config(tmp_path / "caches"), tmp_path)
    plan(monkeypatch, fault)
    act(tmp_path)
    assert capfd.readouterr().out.count("injected fault: ") == 1


def test_no_kind_is_without_a_test() -> None:
    assert set(ACTIONS) == set(ACTIVE)
    assert {fault.partition("@")[0] for fault, _ in SPOILS} == set(PASSIVE)
