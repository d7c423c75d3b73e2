"""A drafter rank: passes the compile gate in its turn, then trains on the rows that the targets send."""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher import faults
from launcher.acceptance import Acceptance, evaluation_steps, request_evaluation
from launcher.barrier import OrderedTurns
from launcher.checkpoint import Checkpointer
from launcher.checkpoint_folder import find_checkpoint
from launcher.compile_gate import TurnReport, forbid_recompiles, pass_gate, recompile_reason, write_report
from launcher.drafter_step import DrafterStep, StepResult
from launcher.errors import ExitCode, LauncherError, StopRequested
from launcher.journal import Progress, clock
from launcher.rank import Models, Rank, compute_dtype, describe_models, user_input
from launcher.runtime import device_mesh
from launcher.schedule import Schedule, is_due, total_steps
from launcher.sinks import MetricsWriter, NoMetrics
from launcher.transfer import RowReceiver, make_transport
from models.attention import choose_backend
from models.dflash import DFlashDrafter
from models.draft_step import DraftForward, FrozenEnds, RowBatch
from models.export import load_drafter
from models.target_ends import load_frozen_ends

log = logging.getLogger("launcher")


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
    return Training(rank, models, factory).run()


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


def to_compute(batch: RowBatch, dtype: torch.dtype) -> RowBatch:
    """The batch with its features in the compute dtype (no copy where they are already)."""
    return replace(batch, features=batch.features.to(dtype))


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


class Training:
    """The loop: rows in, steps, metrics, checkpoints, evaluations; stops are agreed at step boundaries."""

    def __init__(self, rank: Rank, models: Models, factory: StepFactory) -> None:
        self.rank, self.config = rank, rank.config
        runtime = rank.config.runtime
        with rank.lifecycle.phase("load", runtime.load_timeout):
            steps = self._count_steps()
            self.step = factory.build(rank.groups.drafters, steps)
            self.checkpointer = Checkpointer(
                runtime.run_dir,
                rank.config.checkpoint,
                rank.groups.saves,
                rank.lifecycle.wait_until,
                runtime.save_timeout,
            )
            self.schedule = self._resume(steps)
        self.dtype = compute_dtype(rank.config)
        transport = make_transport(rank.groups.rows_backend, rank.groups.rows, rank.torch_device, runtime.step_timeout)
        self.receiver = RowReceiver(
            models.layout, self.schedule.source, rank.torch_device, transport, rank.control, rank.lifecycle
        )
        self.metrics = self._open_metrics()
        self.progress = Progress(self.schedule.start_step, steps)
        self.pending: deque[StepResult] = deque()
        self.meter = Meter(rank.config.data.row_length, self.schedule.per_step)
        self.bad_steps, self.started = 0, time.monotonic()
        self.acceptance: dict[int, Acceptance] = {}

    def run(self) -> str:
        schedule, config = self.schedule, self.config
        evaluations = evaluation_steps(config.eval, schedule)
        self._evaluate(schedule.start_step, evaluations)
        for step in range(schedule.start_step, schedule.last_step):
            self.rank.lifecycle.step = step
            limit = config.runtime.step_timeout * (3 if step == schedule.start_step else 1)
            with self.rank.lifecycle.phase("step", limit, defer_stop=True):
                self._train(step)
                stop = self._vote_stop()
            done = step + 1
            self.rank.lifecycle.step = done
            self.checkpointer.poll()
            if stop or is_due(done, config.checkpoint.every, schedule.last_step):
                self._save(done, required=bool(stop) or done == schedule.last_step)
            if stop:
                self.rank.control.set("ended", done)
                raise StopRequested(ExitCode(stop))
            self._evaluate(done, evaluations)
        self._settle(0)
        self.metrics.close()
        return self._summary()

    def _summary(self) -> str:
        steps, run_dir = self.schedule.last_step, self.config.runtime.run_dir
        lines = [
            f"trained to step {steps} in {clock(time.monotonic() - self.started)}; checkpoints in {run_dir}/checkpoints"
        ]
        if self.acceptance:
            first, last = min(self.acceptance), max(self.acceptance)
            change = " -> ".join(
                f"{self.acceptance[step].length:.2f} (step {step})" for step in dict.fromkeys([first, last])
            )
            lines.append(f"acceptance length on held-out prompts: {change}")
        return "; ".join(lines)

    def _open_metrics(self) -> MetricsWriter | NoMetrics:
        rank = self.rank
        if not rank.leads_drafters:
            return NoMetrics()
        return MetricsWriter(rank.config, rank.attempt_dir, self.schedule.start_step)

    def _count_steps(self) -> int:
        rows = self.rank.wait_for("rows/0", "the targets to pack the rows", self.config.runtime.load_timeout)
        return total_steps(self.config.train, rows, self.rank.topology.drafter_count)

    def _resume(self, steps: int) -> Schedule:
        """Load the newest usable checkpoint, if any; the leader tells all ranks where the run starts."""
        rank, start, position = self.rank, 0, 0
        path = self._find_checkpoint()
        if path is not None:
            state = self.step.state()
            extra = self.checkpointer.load(path, state)
            self.step.load_state(state)
            start, position = extra["step"], extra["micro_batches"]
            rank.lifecycle.step = start
            rank.journal.announce(f"resumed from {path} at step {start}")
        schedule = {"last_step": max(steps, start), "start_step": start, "start_micro_batch": position}
        if rank.leads_drafters:
            rank.control.set("schedule", schedule)
        return Schedule(rank.topology, self.config.train.accumulation, **schedule)

    def _find_checkpoint(self) -> Path | None:
        """The checkpoint to resume from; one rank chooses, because choosing also tidies the folder."""
        rank, runtime = self.rank, self.config.runtime
        if rank.leads_drafters:
            found = find_checkpoint(runtime.run_dir, runtime.resume)
            for notice in found.notices:
                rank.journal.announce(notice)
            rank.control.set("resume", {"path": None if found.path is None else str(found.path)})
        chosen = rank.wait_for("resume", "the first drafter to choose a checkpoint", runtime.load_timeout)["path"]
        return None if chosen is None else Path(chosen)

    def _train(self, step: int) -> None:
        timeout = self.config.runtime.step_timeout
        mine = self.schedule.of_drafter(step, self.rank.role.index)
        following = (
            self.schedule.of_drafter(step + 1, self.rank.role.index) if step + 1 < self.schedule.last_step else []
        )
        for place, index in enumerate(mine):
            with self.meter.waiting():
                batch = to_compute(self.receiver.take(index, timeout), self.dtype)
            faults.spoil_features(batch.features, step)
            self._accumulate(batch, last=place == len(mine) - 1)
            self.receiver.prefetch([*mine[place + 1 :], *following])
        self.pending.append(self.step.update(step))
        self._settle(1)

    def _accumulate(self, batch: RowBatch, last: bool) -> None:
        try:
            self.step.accumulate(batch, last)
        except Exception as error:
            reason = recompile_reason(error)
            if reason is None:
                raise
            raise LauncherError(
                f"the training step would compile again after the gate: {reason}",
                "keep shapes fixed, or allow it with --compile.on_recompile=warn",
            ) from error

    def _settle(self, leave: int) -> None:
        """Read the results of all but the last `leave` steps: a step's numbers are read while the next one runs."""
        while len(self.pending) > leave:
            result = self.pending.popleft()
            metrics = result.read() | self.meter.lap(self.rank.torch_device)
            self._judge(result.step, bool(metrics.pop("finite")))
            done = result.step + 1
            self.metrics.write(done, metrics)
            if is_due(done, self.config.log.every, self.schedule.last_step):
                self.rank.journal.announce(self.progress.line(done, metrics))

    def _judge(self, step: int, finite: bool) -> None:
        """Count steps in a row without a finite gradient; the update left the weights alone on every rank."""
        self.bad_steps = 0 if finite else self.bad_steps + 1
        if finite:
            return
        rows = f"micro-batches {self.schedule.position(step)}..{self.schedule.position(step + 1) - 1}"
        if self.bad_steps > self.config.train.max_bad_steps:
            raise LauncherError(
                f"the gradient was not finite in {self.bad_steps} steps in a row, last at step {step} ({rows})",
                "lower train.lr, or look at those rows",
            )
        log.warning("step %d skipped: its gradient is not finite (%s)", step, rows)

    def _vote_stop(self) -> int:
        """The exit code of an agreed stop, 0 to go on. Every drafter takes part in every step."""
        vote = torch.tensor([int(self.rank.lifecycle.stop_code or 0)])
        dist.all_reduce(vote, dist.ReduceOp.MAX, group=self.rank.groups.votes)
        return int(vote)

    def _save(self, done: int, required: bool) -> None:
        with self.rank.lifecycle.phase("save", self.config.runtime.save_timeout, defer_stop=True):
            self._settle(0)  # a run that goes on from here does not do these steps again
            extra = {
                "step": done,
                "micro_batches": self.schedule.position(done),
                "config": self.config.model_dump(mode="json"),
            }
            self.checkpointer.save(done, self.step.state(), extra, required=required)

    def _evaluate(self, done: int, evaluations: set[int]) -> None:
        if done not in evaluations:
            return
        with self.rank.lifecycle.phase("eval", self.config.runtime.eval_timeout, defer_stop=True):
            self._settle(0)
            acceptance = request_evaluation(self.rank, done, self.step)
        self.meter.skip()
        if acceptance is None:
            return
        self.acceptance[done] = acceptance
        self.metrics.write(done, {"eval_acceptance_length": acceptance.length, "eval_prompts": acceptance.prompts})
        self.rank.journal.announce(
            f"acceptance length {acceptance.length:.2f} after {done} steps"
            f" ({acceptance.prompts} held-out prompts, {acceptance.tokens} tokens in {acceptance.target_steps} target steps)"
        )


class Meter:
    """Rates of the training loop, in wall-clock seconds between two results."""

    def __init__(self, row_length: int, rows_per_step: int) -> None:
        self._row_length, self._rows = row_length, rows_per_step
        self._waited = 0.0
        self._last = time.perf_counter()

    def waiting(self) -> Any:
        return _Waiting(self)

    def skip(self) -> None:
        """Leave the time since the last result out (an evaluation)."""
        self._waited, self._last = 0.0, time.perf_counter()

    def add(self, seconds: float) -> None:
        self._waited += seconds

    def lap(self, device: torch.device) -> dict[str, float]:
        now = time.perf_counter()
        seconds = max(now - self._last, 1e-9)
        waited, self._waited, self._last = self._waited, 0.0, now
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        return {
            "step_seconds": round(seconds, 4),
            "rows_per_s": self._rows / seconds,
            "tokens_per_s": self._rows * self._row_length / seconds,
            "data_wait": min(1.0, waited / seconds),
            "peak_memory_gb": peak / 1e9,
        }


class _Waiting:
    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._meter.add(time.perf_counter() - self._start)
