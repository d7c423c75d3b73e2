"""Which exports of a run stay: never more than somebody may want, and nothing of anybody else's goes."""

from __future__ import annotations

import json
import logging
import os
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from launcher import acceptance
from launcher.acceptance import Acceptance, Evaluator, ExportFailed, answer_evaluation, request_evaluation
from launcher.config import validate
from launcher.exports import export_folder, rate_export, read_ratings, superseded
from launcher.outcome import failure_code
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


def rank_of(run_dir: Path, told: dict[str, Any], number: int = 2) -> Any:
    """A rank of two targets and two drafters whose waits must be over at once; `told` is the control plane."""
    topology = build_topology(Split(2, 2))
    return SimpleNamespace(
        config=validate({"runtime": {"run_dir": run_dir}}),
        topology=topology,
        role=topology.roles[number],
        leads_drafters=number == 2,
        control=SimpleNamespace(set=told.__setitem__, get=told.get, has=lambda *keys: told.keys() >= set(keys)),
        lifecycle=SimpleNamespace(
            stop_code=None,
            wait_until=lambda ready, *_: ready() or pytest.fail("waits"),
            phase=lambda *_, **__: nullcontext(),
        ),
    )


def test_an_evaluation_rates_what_it_exported_and_tidies(tmp_path: Path) -> None:
    told: dict[str, Any] = {}
    rank = rank_of(tmp_path, told)
    drafter = SimpleNamespace(drafter=DFlashDrafter(CONFIG))
    for step, gained in ((0, 1), (5, 3), (9, 2), (12, 2)):
        told |= {f"eval/{step}/0": [[gained] * 4], f"eval/{step}/1": [[gained], [gained]]}
        measured = request_evaluation(rank, step, cast(Any, drafter))
        assert measured == Acceptance(gained, 6, 6 * gained, 3)
    assert names(tmp_path) == ["acceptance.json", "step-12", "step-5"]
    assert read_ratings(tmp_path) == {5: 3.0, 12: 2.0}
    load_drafter(export_folder(tmp_path, 5), torch.bfloat16, "cpu")


FULL = OSError(28, "No space left on device")


@pytest.mark.parametrize("error", [FULL, SafetensorError("I/O error: No space left on device (os error 28)")], ids=str)
def test_an_export_that_the_disk_does_not_take_costs_an_evaluation_on_all_ranks(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told: dict[str, Any] = {}
    drafter: Any = SimpleNamespace(drafter=DFlashDrafter(CONFIG))
    monkeypatch.setattr(acceptance, "export_drafter", lambda *_: (_ for _ in ()).throw(error))
    for number in (2, 3):
        assert Evaluator(rank_of(tmp_path, told, number)).measure(5, drafter, required=False) is None
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 2 and all(record.__dict__["shared"] for record in warnings), "for the console, once"
    (warning,) = {record.getMessage() for record in warnings}
    assert str(export_folder(tmp_path, 5)) in warning and "No space left" in warning and "(1 of 3 in a row)" in warning
    team: Any = SimpleNamespace(leads=True, agree=lambda decide, *_: decide())
    answer_evaluation(rank_of(tmp_path, told, 0), 5, cast(Any, None), [[1]], team)
    assert told.keys() == {"eval/5"}, "no target has decoded anything"


def test_exports_that_fail_in_a_row_end_the_run_and_so_does_the_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, Any] = {f"eval/3/{target}": [[2]] for target in range(2)}
    drafter: Any = SimpleNamespace(drafter=DFlashDrafter(CONFIG))
    evaluators = [Evaluator(rank_of(tmp_path, told, number)) for number in (2, 3)]
    for step in range(1, 7):
        with monkeypatch.context() as patch:
            if step != 3:
                patch.setattr(acceptance, "export_drafter", lambda *_: (_ for _ in ()).throw(FULL))
            for evaluator in evaluators:
                if step < 6:
                    measured = evaluator.measure(step, drafter, required=False)
                    assert measured == (Acceptance(2, 2, 4, 2) if step == 3 else None)
                    continue
                with pytest.raises(ExportFailed, match="step-6 failed .OSError: .*No space left") as raised:
                    evaluator.measure(step, drafter, required=False)
                assert raised.value.ranks_at_fault == {2} and failure_code(raised.value) == 75
    with pytest.raises(ExportFailed):
        Evaluator(rank_of(tmp_path, told, 3)).measure(6, drafter, required=True)


def test_an_export_of_weights_that_are_none_is_no_matter_of_the_disk(tmp_path: Path) -> None:
    spoiled: Any = SimpleNamespace(drafter=DFlashDrafter(CONFIG))
    next(spoiled.drafter.parameters()).data.fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        Evaluator(rank_of(tmp_path, {})).measure(1, spoiled, required=False)


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
