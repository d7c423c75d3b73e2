"""The folder `export` of a run: a drafter as it was evaluated, per evaluation, and how good each was. No torch.

Evaluations can be far more frequent than checkpoints are kept, so those that nobody would serve are removed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from pathlib import Path

from launcher.checkpoint_folder import published, step_of
from launcher.whole_files import write_whole

RATINGS = "acceptance.json"
# What `export_drafter` writes; a folder that holds anything else is somebody's, and stays.
CONTENT = {"config.json", "model.safetensors"}
_NAME = re.compile(r"step-(0|[1-9]\d*)")
log = logging.getLogger(__name__)


def export_folder(run_dir: Path, step: int) -> Path:
    return run_dir / "export" / f"step-{step}"


def rate_export(run_dir: Path, step: int, score: float) -> None:
    """Note the acceptance length of the newest export, and remove those that `superseded` names.

    A disk that refuses costs a warning: the next evaluation does it again.
    """
    try:
        ratings = {**read_ratings(run_dir), step: score}
        exported = _exported(run_dir)
        removed = superseded(exported, ratings, {step_of(folder) for folder in published(run_dir)}, step)
        _write_ratings(run_dir, {number: ratings[number] for number in exported - set(removed) if number in ratings})
        for number in removed:
            _remove(export_folder(run_dir, number))
    except OSError as error:
        log.warning("exports of earlier evaluations stay: %s", error)


def superseded(exported: set[int], ratings: dict[int, float], checkpoints: set[int], newest: int) -> list[int]:
    """The steps whose exports go: all older than `newest` but those of kept checkpoints and the best one.

    What is later than `newest` was left by a run that this one starts anew, and is touched when this one gets there.
    """
    older = {step for step in exported if step < newest}
    rated = [step for step in older | {newest} if step in ratings]
    best = max(rated, key=lambda step: (ratings[step], step), default=newest)
    return sorted(older - checkpoints - {best})


def read_ratings(run_dir: Path) -> dict[int, float]:
    """Acceptance length by step; {} where no or half a file is."""
    try:
        return {int(step): score for step, score in json.loads((run_dir / "export" / RATINGS).read_text()).items()}
    except (FileNotFoundError, ValueError):
        return {}


def _write_ratings(run_dir: Path, ratings: dict[int, float]) -> None:
    write_whole(run_dir / "export" / RATINGS, json.dumps(dict(sorted(ratings.items())), indent=1) + "\n")


def _exported(run_dir: Path) -> set[int]:
    """Steps of the exports that are ours alone."""
    named = [(_NAME.fullmatch(path.name), path) for path in (run_dir / "export").iterdir()]
    return {
        int(match[1])
        for match, path in named
        if match and path.is_dir() and not path.is_symlink() and {file.name for file in path.iterdir()} == CONTENT
    }


def _remove(folder: Path) -> None:
    """First the name, so that nobody loads half an export."""
    doomed = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    os.rename(folder, doomed)
    shutil.rmtree(doomed)
