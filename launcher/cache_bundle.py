"""One file that carries compile caches to another machine of the same fingerprint.

A tar file: `bundle.json` first (the manifests, with the sha256 of every file), then the files as `CACHE/PATH`.
Importing trusts nothing in it: names are computed here, and everything is checked in a staging folder before it moves.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import tarfile
import tempfile
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from launcher.cache_files import PARTS, CachedFile, Manifest, damage, make_own_folder, record, write_manifest
from launcher.cache_key import folder_name
from launcher.compile_cache import hold
from launcher.errors import RetryableError, UserError
from launcher.fingerprint import Fingerprint, cache_fields, diff

INDEX = "bundle.json"
MAX_INDEX_BYTES = 64 << 20
CHUNK = 1 << 20


class Bundle(BaseModel):
    """The index of a bundle: cache folder name -> manifest."""

    model_config = ConfigDict(extra="forbid")

    format: Literal[1] = 1
    caches: dict[str, Manifest]


def export_caches(caches: dict[Path, Manifest], out: Path) -> Bundle:
    """Write caches into one file, whole or not at all, readable by its owner only.

    Raises:
        UserError: a cache is damaged, or `out` cannot be written.
    """
    for folder, manifest in caches.items():
        if found := damage(folder, manifest):
            raise UserError(f"{folder} is damaged: {found[0]}", "remove it with ./launch.sh cache prune --damaged")
    bundle = Bundle(caches={folder.name: record(folder, manifest) for folder, manifest in caches.items()})
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            with tarfile.open(fileobj=file, mode="w") as tar:
                index = bundle.model_dump_json().encode()
                member = tarfile.TarInfo(INDEX)
                member.size = len(index)
                tar.addfile(member, io.BytesIO(index))
                for folder in caches:
                    for path in bundle.caches[folder.name].files:
                        tar.add(folder / path, f"{folder.name}/{path}", recursive=False)
            os.fsync(file.fileno())
        os.replace(temporary, out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error}", "choose another file") from error
    finally:
        temporary.unlink(missing_ok=True)
    return bundle


def import_bundle(file: Path, root: Path, fingerprint: Fingerprint) -> Bundle:
    """Check a bundle whole, then add its files to the caches under `root`; files that are there already stay.

    Raises:
        UserError: unreadable, damaged, built by another environment, or with an entry that does not belong.
        RetryableError: no room.
    """
    root.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".importing-", dir=root))
    try:
        with tarfile.open(file, "r:") as tar:
            bundle = _read_index(tar, file)
            _check_origin(bundle, fingerprint)
            _unpack(tar, bundle, staging)
        for name, manifest in bundle.caches.items():
            _move_in(staging / name, root / name, manifest)
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"{file} is not a whole cache bundle: {error}", "export it again") from None
    except FileNotFoundError as error:
        raise UserError(f"cannot read {error.filename}", "check the path") from None
    except (OSError, ValueError) as error:
        raise RetryableError(
            f"cannot import {file} into {root}: {error}", "check permissions and free space"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return bundle


def _read_index(tar: tarfile.TarFile, file: Path) -> Bundle:
    member = tar.next()
    if member is None or member.name != INDEX or not member.isreg() or member.size > MAX_INDEX_BYTES:
        raise UserError(f"{file} does not start with {INDEX}", "give a file of ./launch.sh cache export")
    content = tar.extractfile(member)
    assert content is not None, "a regular file has content"
    try:
        return Bundle.model_validate_json(content.read())
    except ValidationError as error:
        raise UserError(f"{file}: {INDEX} is damaged: {error.errors()[0]['msg']}", "export it again") from None


def _check_origin(bundle: Bundle, fingerprint: Fingerprint) -> None:
    """Another fingerprint is refused with its differing fields; so are names that lead out of the cache."""
    for name, manifest in bundle.caches.items():
        changes = diff(cache_fields(manifest.fingerprint), cache_fields(fingerprint))
        if changes:
            fields = "\n".join(f"  {change}" for change in changes)
            raise UserError(f"the bundle was built by another environment:\n{fields}", "compile here instead")
        if name != folder_name(fingerprint, manifest.shape):
            raise UserError(f"the bundle has a cache of the wrong name: {name!r}", "do not use this file")
        for path in manifest.files:
            parts = PurePosixPath(path).parts
            if len(parts) < 2 or parts[0] not in PARTS or ".." in parts or str(PurePosixPath(path)) != path:
                raise UserError(f"the bundle has a path that leaves its cache: {path!r}", "do not use this file")


def _unpack(tar: tarfile.TarFile, bundle: Bundle, staging: Path) -> None:
    wanted = {f"{name}/{path}": entry for name, cache in bundle.caches.items() for path, entry in cache.files.items()}
    free = shutil.disk_usage(staging).free
    if sum(entry.size for entry in wanted.values()) > free:
        raise RetryableError(f"the bundle needs more than the {free >> 20} MiB that are free", "make room")
    while (member := tar.next()) is not None:
        entry = wanted.pop(member.name, None)
        if entry is None or not member.isreg() or member.size != entry.size:
            raise UserError(f"the bundle has an entry that does not belong: {member.name!r}", "do not use this file")
        _unpack_file(tar, member, entry, staging / member.name)
    if wanted:
        raise UserError(f"the bundle lacks {len(wanted)} files, {min(wanted)!r} among them", "export it again")


def _unpack_file(tar: tarfile.TarFile, member: tarfile.TarInfo, entry: CachedFile, target: Path) -> None:
    target.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
    content = tar.extractfile(member)
    assert content is not None, "a regular file has content"
    total = hashlib.sha256()
    with target.open("xb") as file:
        while chunk := content.read(CHUNK):
            total.update(chunk)
            file.write(chunk)
    if total.hexdigest() != entry.sha256:
        raise UserError(f"{member.name} in the bundle has other contents than when it was exported", "export it again")


def _move_in(staged: Path, folder: Path, manifest: Manifest) -> None:
    """Move checked files into a cache, which may exist and be in use; each appears whole."""
    make_own_folder(folder)
    write_manifest(folder, manifest.model_copy(update={"files": {}}), create=True)
    in_use = hold(folder)
    try:
        for path in manifest.files:
            target = folder / path
            target.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
            if not target.exists():
                os.replace(staged / path, target)
        write_manifest(folder, record(folder, manifest, settled=0))
    finally:
        if in_use is not None:
            os.close(in_use)
