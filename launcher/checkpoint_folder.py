"""The folder of checkpoints: names, the `latest` pointer, what is newest, what retention removes. No torch."""

from __future__ import annotations

from pathlib import Path


def newest_published(run_dir: Path) -> Path | None:
    return None
