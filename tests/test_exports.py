"""Which exports of a run stay: never more than somebody may want, and nothing of anybody else's goes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from launcher.acceptance import Acceptance, request_evaluation
from launcher.config import validate
from launcher.exports import export_folder, rate_export, read_ratings, superseded
from launcher.topology import Split, build_topology
from models.dflash import DFlashDrafter
from models.export import CONFIG_NAME, WEIGHTS_NAME, load_drafter
from tests.training import CONFIG

STEPS = st.integers(0, 12)


def export(run_dir: Path, step: int) -> Path:
    folder = export_folder(run_dir, step)
    folder.mkdir(parents=True)
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        (folder / name).touch()
    return folder


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "export").iterdir())


def test_the_newest_the_best_and_those_of_checkpoints_stay(tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / f"checkpoints/step-{step}").mkdir(parents=True)
    (tmp_path / "checkpoints/step-1.tmp").mkdir()
    for step, length in enumerate([1.0, 1.2, 1.1, 1.9, 1.3, 1.4, 1.5]):
        export(tmp_path, step)
        rate_export(tmp_path, step, length)
    assert names(tmp_path) == ["acceptance.json", "step-2", "step-3", "step-4", "step-6"]
    assert read_ratings(tmp_path) == {2: 1.1, 3: 1.9, 4: 1.3, 6: 1.5}


def test_what_somebody_else_made_stays(tmp_path: Path) -> None:
    served, elsewhere = export(tmp_path, 1), export(tmp_path / "other", 2)
    (served / "tokenizer.json").touch()
    (served.parent / "step-2").symlink_to(elsewhere)
    for name in ("step-03", "step-1.old", "mine", ".step-4.7.tmp"):
        (served.parent / name).mkdir()
    (served.parent / "step-5").touch()
    before = names(tmp_path)
    for step in (6, 7):
        export(tmp_path, step)
        rate_export(tmp_path, step, float(step))
    assert names(tmp_path) == sorted([*before, "acceptance.json", "step-7"]) and len(list(elsewhere.iterdir())) == 2


def test_a_run_that_starts_anew_keeps_the_later_exports_of_the_former(tmp_path: Path) -> None:
    for step in (500, 1000):
        export(tmp_path, step)
        rate_export(tmp_path, step, step / 100)
    export(tmp_path, 0)
    rate_export(tmp_path, 0, 1.0)
    assert names(tmp_path) == ["acceptance.json", "step-0", "step-1000"]


def test_damaged_ratings_and_a_disk_that_refuses_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        export(tmp_path, step)
    (tmp_path / "export/acceptance.json").write_text('{"1": 1.')
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        rate_export(tmp_path, 2, 1.5)
    assert "No space left" in caplog.text and export_folder(tmp_path, 1).is_dir()
    rate_export(tmp_path, 2, 1.5)
    assert json.loads((tmp_path / "export/acceptance.json").read_text()) == {"2": 1.5}
    assert not export_folder(tmp_path, 1).exists()


def test_an_evaluation_rates_what_it_exported_and_tidies(tmp_path: Path) -> None:
    told: dict[str, Any] = {}
    rank = SimpleNamespace(
        config=validate({"runtime": {"run_dir": tmp_path}}),
        topology=build_topology(Split(2, 1)),
        leads_drafters=True,
        control=SimpleNamespace(set=told.__setitem__, get=told.get, has=lambda *keys: told.keys() >= set(keys)),
        lifecycle=SimpleNamespace(stop_code=None, wait_until=lambda ready, *_: ready() or pytest.fail("waits")),
    )
    drafter = SimpleNamespace(drafter=DFlashDrafter(CONFIG))
    for step, gained in ((0, 1), (5, 3), (9, 2), (12, 2)):
        told |= {f"eval/{step}/0": [[gained] * 4], f"eval/{step}/1": [[gained], [gained]]}
        acceptance = request_evaluation(cast(Any, rank), step, cast(Any, drafter))
        assert acceptance == Acceptance(gained, 6, 6 * gained, 3)
    assert names(tmp_path) == ["acceptance.json", "step-12", "step-5"]
    assert read_ratings(tmp_path) == {5: 3.0, 12: 2.0}
    load_drafter(export_folder(tmp_path, 5), torch.bfloat16, "cpu")


@given(
    exported=st.sets(STEPS), ratings=st.dictionaries(STEPS, st.floats(1, 9)), checkpoints=st.sets(STEPS), newest=STEPS
)
def test_as_many_stay_as_there_are_reasons(
    exported: set[int], ratings: dict[int, float], checkpoints: set[int], newest: int
) -> None:
    exported |= {newest}
    gone = set(superseded(exported, ratings, checkpoints, newest))
    stay = {step for step in exported - gone if step <= newest}
    assert gone <= {step for step in exported if step < newest} - checkpoints and newest in stay
    assert len(stay - checkpoints - {newest}) <= 1
    assert all(
        ratings[step] <= max(ratings[other] for other in stay if other in ratings) for step in gone & set(ratings)
    )
