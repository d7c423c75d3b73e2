"""`export`: write a checkpoint's drafter in the format that vLLM, SGLang and transformers load.

./launch.sh export --checkpoint runs/q8/checkpoints/step-1000 --out drafters/q8
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from launcher.command_parser import CommandParser
from launcher.errors import UserError


def main(args: list[str]) -> int:
    """Verify the checkpoint, gather its weights in one process, write and re-read the export."""
    parser = CommandParser(prog="./launch.sh export", description="Write a checkpoint in the serving format.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="folder RUN/checkpoints/step-N")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    flags = parser.parse_args(args)
    config_file = flags.checkpoint.resolve().parent.parent / "config.toml"
    if not flags.checkpoint.is_dir():
        raise UserError(f"--checkpoint: no folder {flags.checkpoint}", "give RUN/checkpoints/step-N")
    if not config_file.exists():
        raise UserError(f"--checkpoint: {config_file} is missing", "the checkpoint must lie in its run folder")
    export_checkpoint(flags.checkpoint, tomllib.loads(config_file.read_text()), flags.out)
    return 0


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
