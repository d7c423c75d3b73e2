"""Acceptance length by real speculative decoding: drafters export, targets decode held-out prompts with the export.

What is evaluated is the exported file itself, so a wrong tensor name or dtype shows here and not in a serving engine.
Each target decodes its share of the prompts; the full target is loaded for that time only. A disk that takes no export
costs the evaluation, as a save that fails costs the checkpoint: targets and drafters all pass it over.
"""

from __future__ import annotations

import gc
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from launcher import faults
from launcher.config_sections import EvalConfig
from launcher.errors import RetryableError
from launcher.exports import export_folder, rate_export
from launcher.journal import SHARED
from launcher.rank import Models, Rank, user_input
from launcher.schedule import Schedule, is_due
from launcher.target_team import TargetTeam
from launcher.votes import describe
from models.decode import speculative_generate
from models.export import export_drafter, load_drafter
from models.sharding import whole_tensor
from models.target import load_full_target
from models.target_ends import load_frozen_ends

if TYPE_CHECKING:
    from launcher.drafter_step import DrafterStep

log = logging.getLogger("launcher")


@dataclass(frozen=True)
class Acceptance:
    """Tokens gained per target step, the bonus token included, over all held-out prompts."""

    length: float
    target_steps: int
    tokens: int
    prompts: int

    def __str__(self) -> str:
        counts = f"{self.prompts} held-out prompts, {self.tokens} tokens in {self.target_steps} target steps"
        return f"{self.length:.2f} ({counts})"


def evaluation_steps(config: EvalConfig, schedule: Schedule) -> set[int]:
    """Finished-step counts after which acceptance is measured: before training, every `eval.every`, and at the end.

    Also at the end by a start that finds nothing left to train: the one before may have been lost while it measured.
    """
    if not config.prompts:
        return set()
    start, last = schedule.start_step, schedule.last_step
    first = {start} if start in {0, last} else set()
    return first | {step for step in range(start + 1, last + 1) if is_due(step, config.every, last)}


class ExportFailed(RetryableError):
    """The first drafter could not write the drafter of a step; the exports of other steps are untouched."""

    def __init__(self, step: int, folder: Path, cause: str, rank: int) -> None:
        super().__init__(f"exporting the drafter of step {step} to {folder} failed ({cause})", "make room there")
        self.ranks_at_fault = frozenset({rank})


class Evaluator:
    """The drafters' side of evaluations; every method is called by all of them, in the same order."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._failed_exports = rank, 0

    def measure(self, step: int, drafter_step: DrafterStep, required: bool) -> Acceptance | None:
        """Acceptance after `step` steps; None without an export, or when a stop was asked for meanwhile.

        Args:
            required: raise if it cannot be exported, as at the end of a run, which has that export to show.

        Raises:
            ExportFailed: required, or the last of `checkpoint.max_failed_saves` in a row.
        """
        try:
            acceptance = request_evaluation(self._rank, step, drafter_step)
        except ExportFailed as error:
            self._failed_exports += 1
            limit = self._rank.config.checkpoint.max_failed_saves
            counted = f"{self._failed_exports} of {limit} in a row"
            log.warning("step %d is not evaluated: %s (%s)", step, error, counted, extra=SHARED)
            if required or self._failed_exports >= limit:
                raise
            return None
        self._failed_exports = 0
        return acceptance


def request_evaluation(rank: Rank, step: int, drafter_step: DrafterStep) -> Acceptance | None:
    """Drafters: export the weights, wait for the targets' results. None when a stop was asked for meanwhile.

    Raises:
        ExportFailed: on every drafter, and no target evaluates.
    """
    weights, folder = full_weights(drafter_step), export_folder(rank.config.runtime.run_dir, step)
    if rank.leads_drafters:
        rank.control.set(f"eval/{step}", export_for_targets(weights, drafter_step, folder, step))
    if not _await(rank, [f"eval/{step}"], f"the first drafter to export step {step}"):
        return None
    failed = rank.control.get(f"eval/{step}")["failed"]
    if failed is not None:
        raise ExportFailed(step, folder, failed, rank.topology.drafter_ranks[0])
    keys = [f"eval/{step}/{target}" for target in range(rank.topology.split.targets)]
    if not _await(rank, keys, f"targets to decode the held-out prompts of step {step}"):
        return None
    prompts = [prompt for key in keys for prompt in rank.control.get(key)]
    accepted = [gained for prompt in prompts for gained in prompt]
    acceptance = Acceptance(sum(accepted) / max(1, len(accepted)), len(accepted), sum(accepted), len(prompts))
    if rank.leads_drafters:
        rate_export(rank.config.runtime.run_dir, step, acceptance.length)
    return acceptance


def export_for_targets(
    weights: dict[str, torch.Tensor], drafter_step: DrafterStep, folder: Path, step: int
) -> dict[str, str | None]:
    """Write the export; what all ranks are told of it: where it is, and why it is not if the disk does not take it."""
    try:
        faults.trip("export", step)
        shutil.rmtree(folder, ignore_errors=True)
        export_drafter(weights, drafter_step.drafter.config, folder)
    except (OSError, SafetensorError) as error:
        return {"folder": str(folder), "failed": describe(error)}
    return {"folder": str(folder), "failed": None}


def _await(rank: Rank, keys: list[str], what: str) -> bool:
    """Wait for control keys; False when a stop was asked for meanwhile."""

    def stopped() -> bool:
        return rank.lifecycle.stop_code is not None

    rank.lifecycle.wait_until(
        lambda: rank.control.has(*keys) or stopped(), what, rank.config.runtime.eval_timeout, 0.05
    )
    return not stopped()


def answer_evaluation(rank: Rank, step: int, models: Models, prompts: list[list[int]], team: TargetTeam) -> None:
    """Targets: decode this target's share of the prompts with the exported drafter of `step`, if there is one.

    Those of the first node do, where the export is; other nodes may have no folder in common with it.
    """
    if rank.role.node:
        return
    timeout, what = rank.config.runtime.eval_timeout, f"the drafter's export of step {step}"

    def ended() -> bool:
        return rank.control.has("ended") or rank.lifecycle.stop_code is not None

    def exported() -> bool:
        rank.lifecycle.wait_until(lambda: rank.control.has(f"eval/{step}") or ended(), what, timeout, 0.05)
        return not ended() and rank.control.get(f"eval/{step}")["failed"] is None

    with rank.lifecycle.phase("eval", timeout, defer_stop=True):
        if not team.agree(exported, f"see {what}", timeout):
            return
        share = prompts[rank.role.index :: rank.topology.split.targets]
        folder = Path(rank.control.get(f"eval/{step}")["folder"])
        accepted = decode_prompts(rank, folder, models, share, team)
        if team.leads:
            rank.control.set(f"eval/{step}/{rank.role.index}", accepted)


def decode_prompts(
    rank: Rank, export: Path, models: Models, prompts: list[list[int]], team: TargetTeam
) -> list[list[int]]:
    """Tokens gained per target step, for each prompt; the ranks of a target decode the same ones together."""
    config, device, dtype = rank.config, rank.torch_device, models.layout.dtype
    trust = config.target.trust_remote_code
    if not prompts:
        return []
    model = user_input(lambda: load_full_target(models.folder, dtype, device, trust, team.shard))
    ends = user_input(lambda: load_frozen_ends(models.folder, dtype, device, trust))
    drafter = load_drafter(export, dtype, device)
    team.meet("load the whole target", config.runtime.eval_timeout)
    accepted = []
    for prompt in prompts:
        if not team.agree(lambda: rank.lifecycle.stop_code is None, "take a prompt", config.runtime.eval_timeout):
            break
        rank.lifecycle.check()
        result = speculative_generate(model, drafter, ends, prompt, config.eval.max_new_tokens, stop_ids(models, model))
        accepted.append(result.accepted)
    del model, drafter, ends
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return accepted


def stop_ids(models: Models, model: Any) -> list[int]:
    """Tokens that end an answer: the model's own and the tokenizer's."""
    own = getattr(model.generation_config, "eos_token_id", None)
    listed = own if isinstance(own, list) else [own]
    return sorted({token for token in [*listed, models.tokenizer.eos_token_id] if token is not None})


def full_weights(drafter_step: DrafterStep) -> dict[str, torch.Tensor]:
    """The drafter's weights, whole, on the host; every drafter rank takes part in gathering them."""
    weights = {}
    for name, weight in drafter_step.drafter.state_dict().items():
        weights[name] = whole_tensor(weight).detach().to("cpu", torch.bfloat16)
    return weights
