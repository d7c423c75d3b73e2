"""The compile cache as an asset: one folder per fingerprint and model shape, checked at start, never deleted unasked.

A cache that is damaged, read-only, full or not ours costs one warning and a cold compile in a private folder, never
the run. Several ranks and several runs may share one: Inductor and Triton write beside and rename, and so do we.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher import faults
from launcher.cache_files import (
    IN_USE,
    MANIFEST,
    PARTS,
    SETTLED_SECONDS,
    Manifest,
    damage,
    list_caches,
    make_own_folder,
    network_file_system,
    read_manifest,
    record,
    write_manifest,
)
from launcher.cache_key import folder_name, shape_fields
from launcher.config import Config
from launcher.errors import RetryableError
from launcher.fingerprint import Fingerprint, cache_fields, diff

if TYPE_CHECKING:
    from launcher.control import Control

log = logging.getLogger("launcher")

MIN_FREE_BYTES = 256 << 20


@dataclass
class ActiveCache:
    """The cache of this process: `environment` goes into os.environ before anything is compiled."""

    folder: Path
    notices: list[str]
    """What the user should know; only the rank that activated it has them."""
    private: bool = False
    in_use: int | None = None
    """Descriptor that holds a shared lock against `cache prune`; None for a private cache."""

    @property
    def shared_folder(self) -> Path | None:
        """Where measured rates are kept too; None if it goes with this start."""
        return None if self.private else self.folder

    @property
    def environment(self) -> dict[str, str]:
        names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        return {name: str(self.folder / part) for name, part in zip(names, PARTS, strict=True)}

    def close(self) -> None:
        """Record what the cache holds, or remove a private one. One rank per node does it, after all have finished."""
        if self.private:
            shutil.rmtree(self.folder, ignore_errors=True)
        else:
            list_files(self.folder)
        if self.in_use is not None:
            os.close(self.in_use)
            self.in_use = None


def list_files(folder: Path) -> None:
    """Bring a cache's manifest up to date; where that fails, one warning."""
    try:
        write_manifest(folder, record(folder, read_manifest(folder)))
    except (OSError, ValueError) as error:
        log.warning("compile cache %s: its manifest could not be written: %s", folder, error)


def list_files_soon(folder: Path) -> threading.Timer:
    """The same in the background once the newest files have settled, so that a run that is killed later leaves a true
    manifest. One rank per node does it after the gate."""
    timer = threading.Timer(SETTLED_SECONDS, list_files, [folder])
    timer.daemon = True
    timer.start()
    return timer


def activate(config: Config, device: str, fingerprint: Fingerprint, session: str) -> ActiveCache:
    """Choose the cache folder of a run and check it; the first rank of a node does. Sets no environment variable.

    Args:
        config: settled for its device.
        device: `cuda` or `cpu`.
        session: another word for each start, which names the private cache.

    Raises:
        RetryableError: not even a private folder can be made.
    """
    shape = shape_fields(config, device)
    folder = None
    try:
        root = cache_root(config.compile.cache_dir)
        folder = root / folder_name(fingerprint, shape)
        in_use = open_cache(
            folder, Manifest(fingerprint=fingerprint, shape=shape, built_by=str(config.runtime.run_dir.absolute()))
        )
        return ActiveCache(folder, _notices(root, folder, fingerprint), in_use=in_use)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: no home folder
        notice = f"compile cache {folder or 'folder'} is not used, compiling anew in a private one: {error}"
        private = private_folder(session)
        try:
            make_own_folder(private)
        except (OSError, ValueError) as problem:
            raise RetryableError(f"{notice}; {private}: {problem}", "set compile.cache_dir to a local disk") from None
        return ActiveCache(private, [notice], private=True)


def share_cache(own: ActiveCache | None, control: Control, node: int, timeout: float) -> ActiveCache:
    """The cache that the first rank of a node has checked, told to the others: to read all of it once is enough.

    Args:
        own: that rank's; None on the others.
        timeout: seconds to wait for it.

    Raises:
        RetryableError: it did not say in time.
    """
    key = f"cache/{node}"
    if own is not None:
        control.set(key, {"folder": str(own.folder), "private": own.private})
        return own
    told = control.wait(key, f"the first rank of node {node} to check the compile cache", timeout)
    return ActiveCache(Path(told["folder"]), [], told["private"])


def open_cache(folder: Path, fresh: Manifest) -> int | None:
    """Make or check a cache folder and hold it against pruning; returns the descriptor of the lock.

    Raises:
        OSError, ValueError: the folder cannot be used; says why.
    """
    make_own_folder(folder)
    if not (folder / MANIFEST).exists() and any((folder / part).exists() for part in PARTS):
        raise ValueError("it has files but no manifest.json, so nothing says what built them")
    write_manifest(folder, fresh, create=True)  # also proves that the folder can be written
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        raise ValueError(f"only {free >> 20} MiB are free on its disk")
    in_use = hold(folder)
    try:
        if faults.armed("cache", "start"):
            files = read_manifest(folder).files
            faults.cut(folder / next((name for name, file in files.items() if file.size > 1), MANIFEST))
        _check(folder, fresh.fingerprint)
        for part in PARTS:
            (folder / part).mkdir(mode=0o700, exist_ok=True)
    except BaseException:
        if in_use is not None:
            os.close(in_use)
        raise
    return in_use


def hold(folder: Path, exclusive: bool = False) -> int | None:
    """Lock a cache against pruning (shared), or for it; None where the file system knows no locks.

    Raises:
        BlockingIOError: the other side holds it.
    """
    descriptor = os.open(folder / IN_USE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        if not exclusive:
            os.utime(descriptor)  # last use, also of a run that ends without a close
        return descriptor
    except OSError as error:
        os.close(descriptor)
        if error.errno in {errno.ENOLCK, errno.ENOTSUP}:
            return None
        raise


def _check(folder: Path, fingerprint: Fingerprint) -> None:
    manifest = read_manifest(folder)
    changes = diff(cache_fields(manifest.fingerprint), cache_fields(fingerprint))
    if changes:
        raise ValueError(f"another environment built it: {'; '.join(map(str, changes))}")
    found = damage(folder, manifest)
    if found:
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise ValueError(f"it is damaged: {found[0]}{more}; to remove it: ./launch.sh cache prune --damaged")


def _notices(root: Path, folder: Path, fingerprint: Fingerprint) -> list[str]:
    manifest = read_manifest(folder)
    notices = []
    if not manifest.files and (why := explain_cold(root, folder, manifest.shape, fingerprint)):
        notices.append(why)
    if system := network_file_system(folder):
        notices.append(f"compile cache {folder} is on {system}, which is slow: set compile.cache_dir to a local disk")
    return notices


def explain_cold(root: Path, folder: Path, shape: dict[str, str], fingerprint: Fingerprint) -> str | None:
    """Why nothing is cached, if a cache of the same shape exists for another environment."""
    caches = list_caches(root)
    others = [
        entry for path, entry in caches if isinstance(entry, Manifest) and entry.shape == shape and path != folder
    ]
    if not others:
        return None
    last = max(others, key=lambda manifest: manifest.last_use)
    changes = diff(cache_fields(last.fingerprint), cache_fields(fingerprint))
    return f"compile cache is cold, the last one is of another environment: {'; '.join(map(str, changes))}"


def cache_root(configured: Path | None) -> Path:
    """`compile.cache_dir`, or `compile/` in the user's cache folder of this platform."""
    if configured is not None:
        return configured.expanduser().absolute()
    if sys.platform == "darwin":
        return Path.home() / "Library/Caches/dflash-launcher/compile"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash-launcher/compile"


def private_folder(session: str) -> Path:
    """Where a start compiles when its shared cache cannot be used."""
    key = hashlib.sha256(session.encode()).hexdigest()[:12]
    return Path(tempfile.gettempdir()) / f"dflash-launcher-{os.getuid()}-{key}"
