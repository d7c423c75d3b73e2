"""A drafter rank: passes the compile gate in its turn, then trains on the rows that the targets send."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist

from launcher.barrier import OrderedTurns
from launcher.compile_gate import pass_gate
from launcher.compile_report import Stopwatch, TurnBook, TurnReport
from launcher.drafter_step import DrafterStep
from launcher.rank import Models, Rank, compute_dtype, describe_models, to_compute, user_input
from launcher.recompiles import forbid_recompiles
from launcher.runtime import device_mesh
from launcher.training import Training
from launcher.warm_up import warm_up
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
    report = compile_in_turn(rank, factory, batch, drafter_turns)
    with rank.lifecycle.phase("gate", drafter_turns.limit):
        drafter_turns.join()
        if config.target.compile:
            target_turns.join()
    if rank.leads_drafters:
        turn_book(rank, factory).write()
    if config.dry_run:
        done = "compiled and proved" if report.verified else "ran, uncompiled and unproved,"
        return f"dry run: {len(rank.topology.drafter_ranks)} drafter ranks {done} the training step"
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
            float8=train.precision == "float8",
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


def compile_in_turn(rank: Rank, factory: StepFactory, batch: RowBatch, turns: OrderedTurns) -> TurnReport:
    """Build a scratch step, pass the gate with it, and leave its memory to the real one."""
    watch, device, train = Stopwatch(), rank.torch_device, rank.config.train
    with rank.lifecycle.phase("load", rank.config.runtime.load_timeout):
        warm_up(device, compute_dtype(rank.config), rank.groups.solo)
        watch.lap("imports")
        step = factory.build(rank.groups.solo, 1)
        watch.lap("build")
    report = pass_gate(
        rank.role.rank,
        turns,
        step,
        batch,
        train.accumulation * train.draws_per_row,
        turn_book(rank, factory),
        lambda line: rank.journal.announce(line, every_rank=True),
        watch,
    )
    del step
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return report


def turn_book(rank: Rank, factory: StepFactory) -> TurnBook:
    """Where the drafters' turns are kept until compile_report.json is written."""
    path = rank.config.runtime.run_dir / "compile_report.json"
    header = {"turns_order": rank.config.compile.turns, "attention": factory.backend}
    return TurnBook(path, rank.control, rank.topology.drafter_ranks, header)
