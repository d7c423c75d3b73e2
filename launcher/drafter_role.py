"""A drafter rank: passes the compile gate in its turn, then trains on the rows that the targets send."""

from __future__ import annotations

from dataclasses import asdict

import torch
import torch.distributed as dist

from launcher.barrier import OrderedTurns
from launcher.compile_gate import TurnReport, forbid_recompiles, pass_gate, write_report
from launcher.drafter_step import DrafterStep
from launcher.rank import Models, Rank, compute_dtype, describe_models, to_compute, user_input
from launcher.runtime import device_mesh
from launcher.training import Training
from models.attention import choose_backend
from models.dflash import DFlashDrafter
from models.draft_step import DraftForward, FrozenEnds, RowBatch
from models.export import load_drafter
from models.target_ends import load_frozen_ends


def run_drafter(rank: Rank, drafter_turns: OrderedTurns, target_turns: OrderedTurns) -> str:
    """Load, take the turn, wait for all turns, then train; returns one line that sums the run up."""
    config = rank.config
    with rank.lifecycle.phase("load", config.runtime.load_timeout):
        models = describe_models(config)
        ends = user_input(lambda: _load_ends(rank, models))
        batch = gate_batch(rank, models)
    factory = StepFactory(rank, models, ends)
    report = pass_gate(
        rank.role.rank,
        drafter_turns,
        lambda: factory.build(rank.groups.solo, 1),
        batch,
        config.train.accumulation,
        lambda line: rank.journal.announce(line, every_rank=True),
    )
    with rank.lifecycle.phase("gate", drafter_turns.limit):
        publish_report(rank, report)
        drafter_turns.join()
        if config.target.compile:
            target_turns.join()
    if config.dry_run:
        return f"dry run: {len(rank.topology.drafter_ranks)} drafter ranks compiled and proved the training step"
    forbid_recompiles(config.compile.on_recompile)
    return Training(rank, models.layout, lambda steps: factory.build(rank.groups.drafters, steps)).run()


def _load_ends(rank: Rank, models: Models) -> FrozenEnds:
    trust = rank.config.target.trust_remote_code
    return load_frozen_ends(models.folder, compute_dtype(rank.config), rank.torch_device, trust)


class StepFactory:
    """Builds the training step; the gate's scratch one and the real one differ only in the ranks they span."""

    def __init__(self, rank: Rank, models: Models, ends: FrozenEnds) -> None:
        self._rank, self._models, self._ends = rank, models, ends
        self.backend = user_input(lambda: choose_backend(rank.config.drafter.attention, rank.torch_device.type))
        rank.journal.announce(f"attention: {self.backend} on {rank.torch_device.type}, compiled")

    def build(self, group: dist.ProcessGroup | None, steps: int) -> DrafterStep:
        """A compiled drafter with the run's initial weights; sharded over `group` if the run has several drafters."""
        assert group is not None, "only drafter ranks build a step"
        train = self._rank.config.train
        torch.manual_seed(train.seed)
        with torch.device(self._rank.torch_device):
            drafter = DFlashDrafter(self._models.drafter)
        init_from = self._rank.config.drafter.init_from
        if init_from is not None:
            start = user_input(lambda: load_drafter(init_from, torch.float32, self._rank.torch_device))
            user_input(lambda: _same_shape(drafter, start))
            drafter.load_state_dict(start.state_dict())
        drafter.compile_layers()
        mesh, sharded = device_mesh(group, self._rank.device), len(self._rank.topology.drafter_ranks) > 1
        return user_input(lambda: DrafterStep(drafter, self._forward, mesh, train, steps, sharded))

    def _forward(self, drafter: DFlashDrafter) -> DraftForward:
        train = self._rank.config.train
        return DraftForward(
            drafter,
            self._ends,
            anchors=train.anchors,
            backend=self.backend,
            loss=train.loss,
            gamma=train.gamma,
            alpha=train.dpace_alpha,
            seed=train.seed,
            precision=train.precision,
        )


def _same_shape(drafter: DFlashDrafter, start: DFlashDrafter) -> None:
    if drafter.config != start.config:
        raise ValueError("drafter.init_from: the exported drafter has another shape -> match drafter.* and the target")


def gate_batch(rank: Rank, models: Models) -> RowBatch:
    """A row of the real shape and layout: random ids and features, two documents, all of it supervised."""
    layout, device = models.layout, rank.torch_device
    generator = torch.Generator(device).manual_seed(rank.config.train.seed)
    buffer = layout.buffer(device)
    layout.features(buffer).normal_(generator=generator)
    ids, doc, positions = layout.ints(buffer)
    half = layout.row_length // 2
    ids.random_(0, models.drafter.vocab_size, generator=generator)
    doc[half:] = 1
    positions[:half] = torch.arange(half, device=device)
    positions[half:] = torch.arange(layout.row_length - half, device=device)
    layout.loss_mask(buffer).fill_(1)
    return to_compute(layout.batch(0, buffer), compute_dtype(rank.config))


def publish_report(rank: Rank, report: TurnReport) -> None:
    """Collect all drafters' turns; the leader writes compile_report.json."""
    rank.control.set(f"report/{rank.role.rank}", asdict(report))
    if rank.leads_drafters:
        keys = [f"report/{other}" for other in rank.topology.drafter_ranks]
        limit = rank.config.compile.turn_timeout * len(keys)
        rank.lifecycle.wait_until(lambda: rank.control.has(*keys), "the turn reports of all drafters", limit, 0.02)
        reports = [TurnReport(**rank.control.get(key)) for key in keys]
        extra = {"turns_order": rank.config.compile.turns, "attention": report.proof.get("backend")}
        write_report(rank.config.runtime.run_dir / "compile_report.json", reports, extra)
