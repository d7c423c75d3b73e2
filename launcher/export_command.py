"""`export`: write a checkpoint's drafter in the format that vLLM, SGLang and transformers load.

./launch.sh export --checkpoint runs/q8 --out drafters/q8                          the newest checkpoint
./launch.sh export --checkpoint runs/q8/checkpoints/step-1000 --out drafters/q8
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from launcher.checkpoint_folder import POINTER, checkpoints_of, newest_published, published
from launcher.command_parser import CommandParser
from launcher.errors import UserError

EXPECTED = "RUN or RUN/checkpoints/step-N"


def main(args: list[str]) -> int:
    """Verify the checkpoint, gather its weights in one process, write and re-read the export."""
    parser = CommandParser(prog="./launch.sh export", description="Write a checkpoint in the serving format.")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="folder RUN (its newest) or RUN/checkpoints/step-N"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    flags = parser.parse_args(args)
    checkpoint = find_named(flags.checkpoint)
    config_file = checkpoint.resolve().parent.parent / "config.toml"
    if not config_file.exists():
        raise UserError(f"--checkpoint: {config_file} is missing", "the checkpoint must lie in its run folder")
    export_checkpoint(checkpoint, tomllib.loads(config_file.read_text()), flags.out)
    return 0


def find_named(path: Path) -> Path:
    """The checkpoint that a path names: itself, or the newest of a run, given as RUN or RUN/checkpoints/latest.

    Raises:
        UserError: there is none; lists those that are there.
    """
    if path.name == POINTER and path.parent.is_dir():
        path = path.parent.parent
    if not checkpoints_of(path).is_dir():
        there = ", ".join(folder.name for folder in published(path.parent.parent))
        if not path.is_dir():
            raise UserError(f"--checkpoint: no folder {path}", f"give {f'one of {there}' if there else EXPECTED}")
        return path
    newest = newest_published(path)
    if newest is None:
        raise UserError(f"--checkpoint: no checkpoint in {checkpoints_of(path)}", f"give {EXPECTED}")
    return newest


def export_checkpoint(checkpoint: Path, values: dict[str, object], out: Path) -> None:
    """Export a verified checkpoint; `values` is the run's config as read from its TOML file."""
    import torch

    from launcher.checkpoint_io import load_weights
    from launcher.config import for_device, validate
    from launcher.rank import describe_models, user_input
    from models.dflash import DFlashDrafter
    from models.export import export_drafter, load_drafter

    models = describe_models(for_device(validate(values), "cpu"))
    drafter = DFlashDrafter(models.drafter)
    load_weights(checkpoint, drafter.state_dict())
    user_input(lambda: export_drafter(drafter.state_dict(), models.drafter, out))
    count = sum(parameter.numel() for parameter in load_drafter(out, torch.bfloat16, "cpu").parameters())
    print(
        f"exported {checkpoint} to {out}: {len(drafter.state_dict())} tensors, {count / 1e6:.1f} M parameters, bfloat16"
    )
