"""The manifest of a checkpoint: size and SHA-256 of every file, and of itself. No torch.

A distributed checkpoint with a flipped byte loads without a word and trains on wrong numbers; so nothing is loaded
before all its files match what was written.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launcher.whole_files import sync

FILE_NAME = "manifest.json"
FORMAT = 1
FILE_MODE = 0o600
READERS = 8
CHUNK = 1 << 22


def seal_files(paths: list[Path]) -> dict[str, dict[str, Any]]:
    """Make files durable and private, and measure them: name -> size and sha256. The disk writes meanwhile."""
    with ThreadPoolExecutor(2 * READERS) as pool:
        written = [pool.submit(_seal, path) for path in paths]
        measured = pool.map(lambda path: {"size": path.stat().st_size, "sha256": _sha256(path)}, paths)
        sealed = dict(zip([path.name for path in paths], measured, strict=True))
        for sync in written:
            sync.result()
    return sealed


def write_manifest(folder: Path, files: dict[str, dict[str, Any]], step: int) -> None:
    """Write the manifest, durable; a folder without one is not a checkpoint."""
    body: dict[str, Any] = {"format": FORMAT, "step": step, "score": None, "files": dict(sorted(files.items()))}
    _write(folder, body)


def set_score(folder: Path, score: float) -> None:
    """Record how good a published checkpoint is."""
    _write(folder, read_manifest(folder) | {"score": score})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        ValueError: missing, unreadable, changed, or of another format.
    """
    try:
        body = json.loads((folder / FILE_NAME).read_text())
        if not isinstance(body, dict):
            raise ValueError("it is no table of files")
        digest = body.pop("sha256")
    except FileNotFoundError:
        raise ValueError("the manifest is missing") from None
    except (OSError, ValueError, KeyError, RecursionError) as error:
        raise ValueError(f"the manifest is unreadable: {error}") from None
    if digest != _digest_of(body):
        raise ValueError("the manifest was changed")
    if body["format"] != FORMAT:
        raise ValueError(f"format {body['format']} of the manifest is not {FORMAT}, the one this version reads")
    return body


def problems_of(folder: Path, largest: int | None = None) -> list[str]:
    """Everything that keeps a checkpoint from being used; empty when it verifies. Reads every byte.

    Args:
        largest: of files with more bytes than this, only the size is checked.
    """
    if not folder.is_dir():
        return ["no such folder"]
    try:
        files = read_manifest(folder)["files"]
    except ValueError as error:
        return [str(error)]
    present = {path.name for path in folder.iterdir()} - {FILE_NAME}
    problems = [f"unknown file {name}" for name in sorted(present - set(files))]
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda name: _problem(folder / name, files[name], largest), files)
    return problems + [problem for problem in found if problem]


def write_durably(path: Path, text: str) -> None:
    """Write a small private file and wait until it is on disk."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _write(folder: Path, body: dict[str, Any]) -> None:
    """Write a manifest whole or not at all, with the checksum of its own content."""
    temporary = folder.with_name(f"{folder.name}.{FILE_NAME}.tmp")
    write_durably(temporary, json.dumps(body | {"sha256": _digest_of(body)}, indent=1))
    os.replace(temporary, folder / FILE_NAME)
    sync(folder)


def _seal(path: Path) -> None:
    path.chmod(FILE_MODE)
    sync(path)


def _problem(path: Path, expected: dict[str, Any], largest: int | None) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected["size"]:
            return f"{path.name} has {size} bytes, written were {expected['size']}"
        if largest is not None and size > largest:
            return None
        return None if _sha256(path) == expected["sha256"] else f"{path.name} differs from what was written (checksum)"
    except FileNotFoundError:
        return f"{path.name} is missing"
    except OSError as error:
        return f"{path.name} cannot be read: {error}"


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _digest_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
