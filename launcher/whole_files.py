"""Files that nobody ever sees half written, and names that take nobody's place. No torch.

What must outlive a power cut goes through manifest.write_durably instead.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all, readable while other processes or threads write it; the last one wins.

    Raises:
        OSError: the disk does not take it; what was there stays, and nothing is left beside it.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


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
    except OSError:
        return False
    return True
