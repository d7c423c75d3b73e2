"""What a resumed run may change in its configuration, and what would make it another run. No torch."""

from __future__ import annotations

from typing import Any

from launcher.config import Config
from launcher.errors import UserError

# Weights and their meaning depend on these: the target's features, the drafter's shape, what a block is.
FIXED = {
    "target.model",
    "target.revision",
    "target.layer_ids",
    "drafter.layers",
    "drafter.block_size",
    "drafter.mask_token_id",
}
# Of this start alone, not of the run.
PASSING = {"runtime.resume", "runtime.run_dir", "dry_run"}


def changed_keys(saved: dict[str, Any], now: dict[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (saved value, present value) for every option that differs; options that one side lacks are new
    or gone with another version and do not count."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key in saved.keys() & now.keys():
        if isinstance(saved[key], dict) and isinstance(now[key], dict):
            changes |= changed_keys(saved[key], now[key], f"{prefix}{key}.")
        elif saved[key] != now[key]:
            changes[prefix + key] = (saved[key], now[key])
    return dict(sorted(changes.items()))


def check_resumed_config(saved: dict[str, Any], config: Config) -> list[str]:
    """The changes since the checkpoint, a line each, all of them allowed.

    Args:
        saved: the configuration in the checkpoint, as JSON.

    Raises:
        UserError: some are not; names every one of those.
    """
    changes = changed_keys(saved, config.model_dump(mode="json"))
    lines = {key: f"{key}: {before} -> {after}" for key, (before, after) in changes.items() if key not in PASSING}
    refused = [line for key, line in lines.items() if key in FIXED]
    if refused:
        raise UserError(
            f"the checkpoint was trained with other options: {'; '.join(refused)}",
            "use the former ones, start anew with --resume none, or start from an export with drafter.init_from",
        )
    return list(lines.values())
