"""The files of one compile cache and its manifest: what is in it, what built it, whether it is still whole.

A manifest is written when the cache is made, again after the gate, and at every clean close. What it lists is compared
at every start. Files that it does not list are what a run left that was killed in its gate; the compilers wrote them
beside and renamed them, and they are taken as they are: the next gate proves what comes of them before it lists them.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from launcher.fingerprint import Fingerprint
from launcher.whole_files import sync

MANIFEST = "manifest.json"
IN_USE = "in-use.lock"
PARTS = ("inductor", "triton")
CACHE_NAME = re.compile(r"[0-9a-f]{12}-.+-[0-9a-f]{8}")
NETWORK_FILE_SYSTEMS = re.compile(
    r"nfs|cifs|smb|lustre|gpfs|beegfs|ceph|gluster|9p|afs|panfs|wekafs|orangefs|fuse\.(sshfs|s3|gcs|goofys|juicefs)"
)
# A file this young may still be written by a compiler of another run; the next close lists it.
SETTLED_SECONDS = 2.0
READERS = 8


class CachedFile(BaseModel):
    """One listed file. `mtime_ns` only saves hashing it again at a close."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: int
    mtime_ns: int
    sha256: str


class Manifest(BaseModel):
    """What a cache folder says about itself; times in seconds since the epoch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    fingerprint: Fingerprint
    shape: dict[str, str]
    built_by: str
    created: float = Field(default_factory=time.time)
    last_use: float = Field(default_factory=time.time)
    files: dict[str, CachedFile] = Field(default_factory=dict)

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files.values())


def read_manifest(folder: Path) -> Manifest:
    """
    Raises:
        OSError: no manifest.
        ValueError: not a manifest of this format.
    """
    try:
        return Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ValueError(f"{folder / MANIFEST} is damaged: {where} {problem['msg']}") from None


def list_caches(root: Path) -> list[tuple[Path, Manifest | str]]:
    """All caches under a root by name, each with its manifest, or with what is wrong with that."""
    found: list[tuple[Path, Manifest | str]] = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if CACHE_NAME.fullmatch(path.name) and path.is_dir():
            try:
                found.append((path, read_manifest(path)))
            except (OSError, ValueError) as error:
                found.append((path, str(error)))
    return found


def write_manifest(folder: Path, manifest: Manifest, create: bool = False) -> None:
    """Write it whole or not at all; with `create` an existing one stays, whoever was first."""
    temporary = folder / f".{MANIFEST}.{os.getpid()}-{threading.get_ident()}.tmp"
    try:
        temporary.write_text(manifest.model_dump_json() + "\n")
        sync(temporary)
        if create:
            os.link(temporary, folder / MANIFEST)
        else:
            os.replace(temporary, folder / MANIFEST)
        sync(folder)
    except FileExistsError:
        pass  # another rank or run made it at the same time
    finally:
        temporary.unlink(missing_ok=True)


def cache_files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Paths, relative to the cache folder, and stats of the files that never change once they are written."""
    for part in PARTS:
        for parent, folders, names in os.walk(folder / part):
            folders[:] = sorted(name for name in folders if not _is_scratch(name))
            for name in sorted(names):
                path = Path(parent, name)
                if _is_scratch(name):
                    continue
                try:
                    found = path.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # a temporary file of a run that shares the cache
                if stat.S_ISREG(found.st_mode):
                    yield path.relative_to(folder).as_posix(), found


def record(folder: Path, manifest: Manifest, settled: float = SETTLED_SECONDS) -> Manifest:
    """The manifest with the files as they are now; only new and changed ones are hashed."""
    now, files = time.time(), {}
    for path, found in cache_files(folder):
        known = manifest.files.get(path)
        if known and (known.size, known.mtime_ns) == (found.st_size, found.st_mtime_ns):
            files[path] = known
        elif now - found.st_mtime >= settled:
            files[path] = CachedFile(size=found.st_size, mtime_ns=found.st_mtime_ns, sha256=sha256(folder / path))
    return manifest.model_copy(update={"files": files, "last_use": now})


def damage(folder: Path, manifest: Manifest) -> list[str]:
    """What is wrong with the listed files, a line each. Reads them all: on one core a second for 1 GB."""
    with ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda path: _damage_of(folder / path, path, manifest.files[path]), manifest.files)
        return [problem for problem in found if problem]


def _damage_of(path: Path, name: str, file: CachedFile) -> str | None:
    try:
        size = os.stat(path, follow_symlinks=False).st_size
        if size != file.size:
            return f"{name} has {size} bytes instead of {file.size}"
        return None if sha256(path) == file.sha256 else f"{name} has other contents than when it was written"
    except OSError as error:
        return f"{name}: {error.strerror}"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_scratch(name: str) -> bool:
    """Locks, temporary files, and the few files that Inductor rewrites in place (tuning results)."""
    return (
        name.startswith((".", "tmp.")) or name.endswith((".tmp", ".lock", ".best_config")) or name in {"locks", "cache"}
    )


def make_own_folder(folder: Path) -> None:
    """Make a folder that only we can write: what lies in it is code that will run.

    Raises:
        OSError: it cannot be made.
        ValueError: it is there, but not ours alone.
    """
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise ValueError("it is a link, not a folder")
    if found.st_uid != os.getuid():
        raise ValueError(f"it belongs to user id {found.st_uid}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError("others may write to it; chmod go-w")


def network_file_system(folder: Path) -> str | None:
    """Type and mount point if the folder is on a network file system."""
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    for parent in (folder.resolve(), *folder.resolve().parents):
        if parent in mounts:
            return f"{mounts[parent]} ({parent})" if NETWORK_FILE_SYSTEMS.search(mounts[parent]) else None
    return None
