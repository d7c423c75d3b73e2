"""The folder of checkpoints: names, the `latest` pointer, which one to resume from, what to remove. No torch."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.errors import UserError
from launcher.manifest import FILE_NAME as MANIFEST
from launcher.manifest import problems_of, read_manifest, write_durably
from launcher.whole_files import aside_of, sync

POINTER = "latest"
EXTRA = "extra.json"
FOLDER_MODE = 0o700
_NAME = re.compile(r"step-(\d{1,18})")
_SET_ASIDE = re.compile(r"(step-\d+)\.old-\d+")
# Names of half-made and set-aside folders; never resumed from.
TEMPORARY, REPLACED = ".tmp", ".replaced"


@dataclass(frozen=True)
class Found:
    """The checkpoint to resume from, None for a fresh start, and what the user should know about the choice."""

    path: Path | None
    notices: list[str]


def checkpoints_of(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def step_of(folder: Path) -> int:
    """The step in the name of a checkpoint folder."""
    match = _NAME.fullmatch(folder.name)
    assert match is not None, folder
    return int(match[1])


def published(run_dir: Path) -> list[Path]:
    """All checkpoint folders of a run by their names, newest first, verified or not."""
    root = checkpoints_of(run_dir)
    folders = [path for path in root.iterdir() if _NAME.fullmatch(path.name)] if root.is_dir() else []
    return sorted(folders, key=step_of, reverse=True)


def newest_published(run_dir: Path) -> Path | None:
    """The checkpoint that `latest` points to, else the newest with a manifest; cheap, reads no checkpoint."""
    name = _pointed(run_dir)
    pointed = [checkpoints_of(run_dir) / name] if name else []
    complete = [path for path in [*pointed, *published(run_dir)] if (path / MANIFEST).is_file()]
    return complete[0] if complete else None


def read_extra(folder: Path) -> dict[str, Any]:
    """The `extra` that a verified checkpoint was saved with."""
    return json.loads((folder / EXTRA).read_text())["extra"]


def point_to(folder: Path) -> None:
    """Move `latest` to a published folder, whole or not at all."""
    temporary = folder.parent / f"{POINTER}{TEMPORARY}"
    write_durably(temporary, folder.name + "\n")
    os.replace(temporary, folder.parent / POINTER)
    sync(folder.parent)


def publish(temporary: Path, final: Path) -> None:
    """Give a complete folder its name. A folder that has the name already failed its checksums and goes."""
    sync(temporary)
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        os.rename(final, replaced)
    os.rename(temporary, final)
    sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def find_checkpoint(run_dir: Path, resume: str) -> Found:
    """Choose the checkpoint to resume from; called by one rank, before any is written.

    `auto` takes the newest that verifies, `none` sets the old ones aside, anything else is the path of a checkpoint,
    which must verify, and sets aside what this run has beyond it. Leftovers of an interrupted save are removed, and
    `latest` then points to what the run goes on from: until the next save that is its last good checkpoint.

    Raises:
        UserError: checkpoints exist and none can be used.
    """
    notices = _remove_leftovers(run_dir)
    if resume == "none":
        return Found(None, notices + _set_aside(run_dir))
    if resume != "auto":
        return _explicit(run_dir, Path(resume).expanduser(), notices)
    for folder in published(run_dir):
        problems = problems_of(folder)
        if not problems:
            return Found(folder, notices + _mend_pointer(run_dir, folder))
        notices.append(f"skipped checkpoint {folder}: {'; '.join(problems)}")
    if published(run_dir):
        skipped = "\n".join(notices)
        what = f"no usable checkpoint in {checkpoints_of(run_dir)}:\n{skipped}"
        raise UserError(what, "start anew with --resume none")
    return Found(None, notices)


def to_remove(scores: dict[int, float | None], verified: set[int], keep: int) -> list[int]:
    """The steps that retention removes, oldest first.

    Kept are the newest `keep` verified ones, whatever is newer than the oldest of those, and the best by score.
    """
    good = sorted(verified & set(scores), reverse=True)[:keep]
    if len(good) < keep:
        return []
    scored = {step: score for step, score in scores.items() if score is not None}
    best = max(scored, key=lambda step: (scored[step], step)) if scored else None
    return sorted(step for step in scores if step < good[-1] and step != best)


def apply_retention(run_dir: Path, verified: set[int], keep: int) -> list[Path]:
    """Remove what `to_remove` says; returns what was removed."""
    folders = {step_of(folder): folder for folder in published(run_dir)}
    scores = {step: _score(folder) for step, folder in folders.items()}
    removed = [folders[step] for step in to_remove(scores, verified, keep)]
    for folder in removed:
        # First the name, so that a kill midway leaves a leftover and no half checkpoint.
        doomed = folder.with_name(folder.name + TEMPORARY)
        os.rename(folder, doomed)
        shutil.rmtree(doomed)
    return removed


def _score(folder: Path) -> float | None:
    try:
        return read_manifest(folder)["score"]
    except ValueError:
        return None


def check_name(run_dir: Path, folder: Path) -> None:
    """Refuse a checkpoint of the run's own folder whose name would not tell its step, such as one set aside.

    Raises:
        UserError: says how to rename it.
    """
    if not _is_at_home(run_dir, folder) or _NAME.fullmatch(folder.name):
        return
    former = _SET_ASIDE.fullmatch(folder.name)
    name = former[1] if former else "step-N"
    first = f"move {name} away, " if former and folder.with_name(name).exists() else ""
    raise UserError(
        f"checkpoint {folder} is not named step-N, by which its own run would know it",
        f"{first}rename it to {name} and give that; --resume auto takes the newest",
    )


def _explicit(run_dir: Path, folder: Path, notices: list[str]) -> Found:
    check_name(run_dir, folder)
    problems = problems_of(folder)
    if problems:
        raise UserError(
            f"checkpoint {folder} cannot be used: {'; '.join(problems)}", "give another one, or --resume auto"
        )
    # The run goes on from here; what it had done after this point, or from another one, would be taken for newer.
    if not _is_at_home(run_dir, folder):
        return Found(folder, notices + _set_aside(run_dir))
    newer = [path for path in published(run_dir) if step_of(path) > step_of(folder)]
    notices += _mend_pointer(run_dir, folder)
    return Found(folder, notices + [_rename_aside(path) for path in newer])


def _is_at_home(run_dir: Path, folder: Path) -> bool:
    return checkpoints_of(run_dir).resolve() in folder.resolve().parents


def _pointed(run_dir: Path) -> str | None:
    """The name in `latest`; None where there is no such file, or one that names no checkpoint."""
    try:
        name = (checkpoints_of(run_dir) / POINTER).read_text(errors="replace").strip()
    except OSError:
        return None
    return name if _NAME.fullmatch(name) else None


def _mend_pointer(run_dir: Path, chosen: Path) -> list[str]:
    """Point `latest` to the checkpoint that was chosen; a disk that takes it not costs a notice."""
    pointer, name = checkpoints_of(run_dir) / POINTER, _pointed(run_dir)
    if name == chosen.name or chosen.resolve().parent != pointer.parent.resolve():
        return []
    former = f"pointed to {name}" if name else "named no checkpoint"
    if name and not (pointer.parent / name).is_dir():
        former += ", which does not exist"
    try:
        point_to(pointer.parent / chosen.name)
    except OSError as error:
        return [f"{pointer} {former}; it could not be moved to {chosen.name}: {error.strerror}"]
    return [f"{pointer} {former}; it points to {chosen.name} now, where the run goes on"]


def _remove_leftovers(run_dir: Path) -> list[str]:
    root = checkpoints_of(run_dir)
    leftovers = [path for path in root.iterdir() if path.suffix in {TEMPORARY, REPLACED}] if root.is_dir() else []
    for path in leftovers:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [f"removed {path}, left by an interrupted save" for path in leftovers]


def _set_aside(run_dir: Path) -> list[str]:
    root = checkpoints_of(run_dir)
    return [_rename_aside(root)] if published(run_dir) else []


def _rename_aside(path: Path) -> str:
    """Rename a path out of the way, losing nothing."""
    aside = aside_of(path)
    os.rename(path, aside)
    return f"set {path} aside as {aside.name}"
