"""A drafter rank: passes the compile gate in its turn, then trains on the rows that the targets send."""

from __future__ import annotations

import gc

import torch

from launcher.barrier import OrderedTurns
from launcher.compile_gate import pass_gate
from launcher.compile_report import Stopwatch, TurnBook, TurnReport
from launcher.drafter_step import DrafterStep
from launcher.groups import drafter_mesh, solo_mesh
from launcher.rank import Models, Rank, compute_dtype, describe_models, to_compute, user_input
from launcher.recompiles import Recompiles
from launcher.step_factory import StepFactory
from launcher.training import Training
from launcher.warm_up import compiled_or_not, warm_up
from models.draft_step import FrozenEnds, RowBatch
from models.target_ends import load_frozen_ends


def run_drafter(rank: Rank, drafter_turns: OrderedTurns, target_turns: OrderedTurns) -> str:
    """Load, take the turn, wait for all turns, then train; returns one line that sums the run up."""
    config = rank.config
    with rank.lifecycle.phase("load", config.runtime.load_timeout):
        models = describe_models(config)
        ends = user_input(lambda: _load_ends(rank, models))
        batch = gate_batch(rank, models)
        factory = StepFactory(config, models.drafter, ends, rank.torch_device)
        needed_by = "drafter.attention=flex" if factory.backend == "flex" else None
        how = compiled_or_not(needed_by, "drafter.attention=sdpa")
        rank.journal.announce(f"attention: {factory.backend} on {rank.torch_device.type}, {how}")
    report = compile_in_turn(rank, factory, batch, drafter_turns)
    with rank.lifecycle.phase("gate", max(drafter_turns.limit, target_turns.limit)):
        drafter_turns.join()
        if config.target.compile:
            target_turns.join()
    if rank.leads_drafters:
        turn_book(rank, factory).write(required=config.dry_run)
    if config.dry_run:
        done = "compiled and proved" if report.verified else "ran, uncompiled and unproved,"
        return f"dry run: {len(rank.topology.drafter_ranks)} drafter ranks {done} the training step"
    recompiles = Recompiles(config.compile.on_recompile, rank.control)
    sharded = len(rank.topology.drafter_ranks) > 1
    mesh = drafter_mesh(rank.groups, rank.device, rank.topology)

    def build(shift: int, steps: int) -> DrafterStep:
        return factory.build(mesh, steps, sharded, shift)

    return Training(rank, models.layout, build, recompiles).run()


def _load_ends(rank: Rank, models: Models) -> FrozenEnds:
    trust = rank.config.target.trust_remote_code
    return load_frozen_ends(models.folder, compute_dtype(rank.config), rank.torch_device, trust)


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
        warm_up(device, compute_dtype(rank.config), rank.groups.solo, turns.waits(rank.role.rank))
        watch.lap("imports")
        sharded = len(rank.topology.drafter_ranks) > 1
        step = factory.build(solo_mesh(rank.groups, rank.device), 1, sharded)
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
    """Where all turns are kept until compile_report.json is written."""
    path = rank.config.runtime.run_dir / "compile_report.json"
    header = {"turns_order": rank.config.compile.turns, "attention": factory.backend}
    return TurnBook(path, rank.control, rank.gate_ranks, header)
