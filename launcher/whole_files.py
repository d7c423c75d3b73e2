"""Files that nobody ever sees half written and that outlive a power cut, and names that take nobody's place. No torch.

Waiting for the disk takes milliseconds, on some disks tens of them: nothing here is called in a training step.
"""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str, readers_first: bool = False) -> None:
    """Write a file whole or not at all, readable while other processes or threads write it; the last one wins.

    On return it is on disk, under its name.

    Args:
        readers_first: they have it before the disk does, which takes its time while it writes a checkpoint.

    Raises:
        OSError: the disk does not take it; what was there stays, and nothing is left beside it.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text)
        if not readers_first:
            sync(temporary)  # else a power cut may leave the new name with nothing in it
        os.replace(temporary, path)
        if readers_first:
            sync(path)
        sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until the contents of a file, or the names in a folder, are on disk.

    Raises:
        OSError: the disk does not take them.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that knows no such thing, as some do for folders
            raise
    finally:
        os.close(descriptor)


def aside_of(path: Path) -> Path:
    """The first of NAME.old-1, NAME.old-2, ... that is free, beside a path that has to make room."""
    number = 1
    while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
        number += 1
    return aside


def overwrite(path: Path, text: str) -> bool:
    """Write in the place of a file that is there, within the blocks that it has; whether it could be done.

    For the little that must be said on a full disk. A reader may see it half written: no way for anything else.
    """
    data = text.encode()
    try:
        with path.open("r+b", buffering=0) as file:
            if len(data) > os.fstat(file.fileno()).st_blocks * 512:
                return False
            file.write(data)
            file.truncate(len(data))
            os.fsync(file.fileno())
    except OSError:
        return False
    return True
