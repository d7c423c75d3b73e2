"""Drafter folders as serving engines read them: model.safetensors (bfloat16, exact tensor names) and config.json.

The format is that of the published DFlash drafters (z-lab): no prefix, no embedding, no head, no rotary buffers.
Engines ignore unknown names and miss absent ones silently, so both are errors here.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.dflash import DFlashConfig, DFlashDrafter

CONFIG_NAME, WEIGHTS_NAME, INDEX_NAME = "config.json", "model.safetensors", "model.safetensors.index.json"


def expected_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a drafter's tensors: 11 per layer and 3 more."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in DFlashDrafter(config).state_dict().items()}


def check_tensors(tensors: Mapping[str, Tensor], config: DFlashConfig) -> None:
    """Raise ValueError naming every missing, unknown or wrongly shaped tensor."""
    expected = expected_shapes(config)
    problems = [f"missing {name}" for name in expected if name not in tensors]
    problems += [f"unknown {name}" for name in tensors if name not in expected]
    problems += [
        f"{name} is {list(tensors[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    if problems:
        more = f" and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise ValueError(f"these are not the drafter's tensors: {'; '.join(problems[:10])}{more}")


def export_drafter(state_dict: Mapping[str, Tensor], config: DFlashConfig, out: Path) -> None:
    """Write the folder `out` in one rename; an older export there is replaced, anything else is refused.

    state_dict: full (unsharded) tensors of any float dtype and device. Raises ValueError for a wrong tensor set,
    values that are not finite, or an `out` that holds something else.
    """
    check_tensors(state_dict, config)
    broken = [name for name, tensor in state_dict.items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ValueError(f"these weights are not finite, export an earlier checkpoint: {', '.join(broken[:10])}")
    _check_replaceable(out)
    staged = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    staged.mkdir(parents=True)
    try:
        _write(state_dict, config, staged)
        _swap_in(staged, out)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def load_drafter(folder: Path, dtype: torch.dtype, device: torch.device | str) -> DFlashDrafter:
    """The drafter of an exported or published folder, in eval mode.

    Raises ValueError for a folder without the files, a damaged file, an unsupported architecture, or a wrong tensor
    set.
    """
    try:
        config = DFlashConfig.from_dict(json.loads((folder / CONFIG_NAME).read_text()))
        tensors = _read_tensors(folder)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not a drafter folder: {error.filename} is missing") from error
    except (json.JSONDecodeError, SafetensorError) as error:
        raise ValueError(f"{folder} holds a damaged file ({error}): export or download it again") from error
    check_tensors(tensors, config)
    with torch.device("meta"):
        drafter = DFlashDrafter(config)
    drafter.load_state_dict({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True)
    return drafter.eval()


def _write(state_dict: Mapping[str, Tensor], config: DFlashConfig, folder: Path) -> None:
    # clone: safetensors refuses tensors that share memory, as slices of one flat buffer would
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16, copy=True) for name, tensor in state_dict.items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / WEIGHTS_NAME,
        metadata={"format": "pt"},
    )
    (folder / CONFIG_NAME).write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        with open(folder / name, "rb+") as file:
            os.fsync(file.fileno())


def _check_replaceable(out: Path) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir() or {path.name for path in out.iterdir()} != {CONFIG_NAME, WEIGHTS_NAME}:
        raise ValueError(f"{out} exists and is not an earlier export: choose another folder")


def _swap_in(staged: Path, out: Path) -> None:
    """Rename `staged` to `out`; a crash in between leaves the old export under a hidden name, never a mixed folder."""
    old = out.with_name(f".{out.name}.{os.getpid()}.old")
    if out.exists():
        out.rename(old)
    staged.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / INDEX_NAME
    if not index.exists():
        return load_file(folder / WEIGHTS_NAME)
    shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    return {name: tensor for shard in shards for name, tensor in load_file(folder / shard).items()}
