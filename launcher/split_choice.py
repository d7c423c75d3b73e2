"""`topology.split = auto`: targets and drafters from the rates of earlier steps, or from the cost model before any.

Rates lie beside the compile cache, which already has one folder per build, GPU, model and row shape. Without them a run
starts on the cost model's guess, measures its first steps, and starts again once if another split is clearly better.
No torch.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launcher.balance import Rates, best_split, explain_choice
from launcher.config import Config
from launcher.errors import UserError
from launcher.plan_model import Exchange, drafter_seconds, target_seconds
from launcher.plan_shapes import run_shape
from launcher.topology import Split, default_split, resolve_split
from launcher.whole_files import write_whole
from launcher.work_model import find_gpu

if TYPE_CHECKING:
    from launcher.control import Control

log = logging.getLogger("launcher")
RATES_FILE, AGAIN_FILE = "rates.json", "again.json"
# Only the ratio of the two roles matters for a guess, and that is much the same on all GPUs.
ANY_GPU = "H200"


@dataclass(frozen=True)
class Choice:
    """The split of a node and why; `guessed` where nothing has been measured yet."""

    split: Split
    why: str = ""
    guessed: bool = False


def choose_split(config: Config, ranks: int, rates: Rates | None, gpu: str | None) -> Choice:
    """The split that the configuration names, or with `auto` the best one by what is known.

    Args:
        ranks: of this node.
        rates: measured ones, if there are any.
        gpu: name of the GPU, None on a CPU.

    Raises:
        UserError: the ranks cannot hold the split, or any.
    """
    topology = config.topology
    if topology.split != "auto":
        return Choice(resolve_split(ranks, topology.targets, topology.drafters, topology.target_tp))
    usual = default_split(ranks, topology.target_tp)
    known = rates or guess_rates(config, gpu)
    if known is None:
        return Choice(usual, "topology.split=auto: nothing is measured and the target's shape not known yet", True)
    best = best_split(ranks, known, topology.target_tp)
    if rates is None:  # its ratio can be trusted more than its seconds
        costs = f"a row costs a drafter {known.drafter / known.target:.2g} times what it costs a target"
        return Choice(best, f"topology.split=auto, nothing measured yet: by the cost model {costs}: {best}", True)
    return Choice(best, f"topology.split=auto, measured: {explain_choice(best, usual, known)}")


def guess_rates(config: Config, gpu: str | None) -> Rates | None:
    """The cost model's rates; None where the target's shape shows only once it is loaded."""
    try:
        shape = run_shape(config)
    except UserError:
        return None
    sheet = find_gpu(gpu or ANY_GPU) or find_gpu(ANY_GPU)
    assert sheet is not None, "its datasheet is listed"
    return Rates(target_seconds(shape, sheet, config.topology.target_tp), drafter_seconds(shape, sheet, 1, Exchange()))


def agree_on_split(choice: Choice, control: Control, rank: int, node: int, timeout: float) -> Choice:
    """The choice of the first rank, which all ranks take: nodes may know different rates.

    Raises:
        UserError: this node was told another split than the first one.
        RetryableError: the first rank did not say in time.
    """
    mine = asdict(choice)
    if rank == 0:
        control.set("split", mine)
    first = control.wait("split", "the first rank to choose a split", timeout, rank=0)
    agreed = Choice(Split(**first.pop("split")), **first)
    if not choice.why and choice.split != agreed.split:
        raise UserError(
            f"node {node} was started as {choice.split}, the first one as {agreed.split}",
            "start every node with the same flags and --nproc",
        )
    return agreed


def load_rates(folder: Path | None, config: Config, sharing: int, nodes: int) -> Rates | None:
    """Rates that an earlier run measured with this configuration, if there are any that can be read.

    Args:
        sharing: ranks that share a device.
    """
    try:
        return Rates(**_entries(folder)[_key(config, sharing, nodes)])
    except (KeyError, TypeError):
        return None


def save_rates(folder: Path, config: Config, sharing: int, nodes: int, rates: Rates) -> None:
    """Keep measured rates for later starts. A disk that takes them not costs a warning."""
    entries = _entries(folder) | {_key(config, sharing, nodes): asdict(rates)}
    try:
        write_whole(folder / RATES_FILE, json.dumps(entries, indent=1) + "\n")
    except OSError as error:
        log.warning("measured rates are not kept in %s: %s", folder, error.strerror)


def ask_for_another_start(attempt: Path, split: Split) -> bool:
    """Leave word for launch.sh to start the run again with this split; False, and a warning, if the disk does not take
    it: a slower split is no reason to end a run."""
    try:
        write_whole(attempt / AGAIN_FILE, json.dumps(asdict(split)))
    except OSError as error:
        log.warning("the run keeps its split: %s cannot be written: %s", attempt / AGAIN_FILE, error.strerror)
        return False
    return True


def flags_of_another_start(attempt: Path) -> list[str]:
    """The flags to start a run again with, if its last attempt asked for that."""
    try:
        split = Split(**json.loads((attempt / AGAIN_FILE).read_text()))
    except FileNotFoundError:
        return []
    options = {"topology.split": "default", "topology.targets": split.targets, "topology.drafters": split.drafters}
    return [*(f"--{name}={value}" for name, value in options.items()), "--resume=auto"]


def _entries(folder: Path | None) -> dict[str, dict[str, float]]:
    try:
        entries = json.loads((folder / RATES_FILE).read_text()) if folder else {}
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _key(config: Config, sharing: int, nodes: int) -> str:
    """What a row's seconds depend on beside what the cache folder is named after."""
    train, target_tp = config.train, config.topology.target_tp
    work = f"accumulation={train.accumulation} draws={train.draws_per_row} target_tp={target_tp}"
    return f"{work} ranks_per_device={sharing} nodes={nodes}"
