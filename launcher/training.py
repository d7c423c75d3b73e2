"""The training loop of a drafter rank: rows in, steps, metrics, checkpoints, evaluations."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from launcher import faults
from launcher.acceptance import Acceptance, Evaluator, evaluation_steps
from launcher.bad_rows import find_bad_losses
from launcher.balance import Balance
from launcher.calibration import Calibration
from launcher.deadlines import collective_patience, first_step
from launcher.drafter_step import DrafterStep, StepResult
from launcher.errors import ExitCode, LauncherError, PeerFailed, StopRequested
from launcher.journal import SHARED, Progress, clock
from launcher.meter import Meter, over_drafters
from launcher.rank import Rank, compute_dtype, to_compute
from launcher.recompiles import Recompiles
from launcher.resume import resume
from launcher.row_layout import RowLayout
from launcher.run_record import keep_bottleneck
from launcher.schedule import is_due
from launcher.sinks import MetricsWriter, NoMetrics
from launcher.topology import Split
from launcher.transfer import RowReceiver
from launcher.transport_choice import make_transport

log = logging.getLogger("launcher")


class Training:
    """One drafter's part of the loop; stops are agreed at step boundaries."""

    def __init__(
        self, rank: Rank, layout: RowLayout, build: Callable[[int, int], DrafterStep], recompiles: Recompiles
    ) -> None:
        self.rank, self.config, self.recompiles = rank, rank.config, recompiles
        runtime = rank.config.runtime
        with rank.lifecycle.phase("load", runtime.load_timeout):
            self.step, self.checkpointer, self.schedule = resume(rank, build)
        self.dtype = compute_dtype(rank.config)
        patience, groups = collective_patience(runtime), rank.groups
        transport = make_transport(groups.rows_backend, groups.rows, rank.torch_device, patience, rank.control)
        self.receiver = RowReceiver(
            layout, self.schedule.source, rank.torch_device, transport, rank.control, rank.lifecycle
        )
        self.metrics = self._open_metrics()
        self.progress = Progress(self.schedule.start_step, self.schedule.last_step)
        self.pending: deque[StepResult] = deque()
        self.meter = Meter(rank.config.data.row_length, self.schedule.per_step, rank.torch_device)
        self.balance = Balance(rank.topology.split)
        self.calibration = Calibration(rank, self.balance)
        self.bad_steps, self.started = 0, time.monotonic()
        self.evaluator = Evaluator(rank)
        self.acceptance: dict[int, Acceptance] = {}

    def run(self) -> str:
        """Train to the last step, a stop that all drafters agree on, or a better split; the line that sums it up."""
        with self.rank.lifecycle.agreed_stops():
            return self._run()

    def _run(self) -> str:
        schedule, config = self.schedule, self.config
        evaluations = evaluation_steps(config.eval, schedule)
        with self.rank.lifecycle.phase("load", config.runtime.load_timeout, defer_stop=True):
            stop = self._vote_stop()  # targets that were asked to stop meanwhile have left, and will send no row
        self._end_if_asked(stop, schedule.start_step)
        self._evaluate(schedule.start_step, evaluations)
        for step in range(schedule.start_step, schedule.last_step):
            stop, done = self._take_step(step), step + 1
            self.rank.lifecycle.step = done
            self.checkpointer.poll()
            if stop or is_due(done, config.checkpoint.every, schedule.last_step):
                self._save(done, required=bool(stop) or done == schedule.last_step)
            self._end_if_asked(stop, done)
            if (better := self.calibration.better_split(schedule.last_step - done)) is not None:
                return self._start_again(done, better)
            self._evaluate(done, evaluations)
        self._settle(0)
        self.receiver.close()
        self.metrics.close()
        self._name_bottleneck()
        return self._summary()

    def _take_step(self, step: int) -> int:
        """Train on one step's rows; the exit code of a stop that was agreed on meanwhile, 0 to go on."""
        self.rank.lifecycle.step = step
        runtime, first = self.config.runtime, step == self.schedule.start_step
        limit = first_step(runtime) if first else runtime.step_timeout
        option = "runtime.first_step_timeout" if first else None
        with self.rank.lifecycle.phase("step", limit, defer_stop=True, option=option):
            with self.recompiles.watch("the training step"):
                self._train(step, limit)
            return self._vote_stop()

    def _end_if_asked(self, stop: int, done: int) -> None:
        if stop:
            self._name_bottleneck()
            self.receiver.close()
            self.rank.control.set("ended", done)
            raise StopRequested(ExitCode(stop))

    def _start_again(self, done: int, split: Split) -> str:
        """Leave what was trained to an attempt with a better split."""
        self._save(done, required=True)
        with self.rank.lifecycle.phase("step", self.config.runtime.step_timeout, defer_stop=True):
            self.receiver.drain(self.config.runtime.step_timeout)
        self.receiver.close()
        self.rank.control.set("ended", done)
        self.metrics.close()
        return f"measured for {done - self.schedule.start_step} steps, going on as {split}"

    def _summary(self) -> str:
        steps, run_dir = self.schedule.last_step, self.config.runtime.run_dir
        taken = clock(time.monotonic() - self.started)
        lines = [
            f"trained to step {steps} in {taken}, {self.recompiles.total()} recompiles",
            f"checkpoints in {run_dir}/checkpoints",
        ]
        if self.acceptance:
            first, last = min(self.acceptance), max(self.acceptance)
            change = " -> ".join(
                f"{self.acceptance[step].length:.2f} (step {step})" for step in dict.fromkeys([first, last])
            )
            lines.append(f"acceptance length on held-out prompts: {change}")
        return "; ".join(lines)

    def _name_bottleneck(self) -> None:
        """On the console and for the report, where steps were counted; every step's numbers have been read by now."""
        if (verdict := self.balance.verdict()) is None:
            return
        self.rank.journal.announce(verdict)
        if self.rank.leads_drafters:
            keep_bottleneck(self.rank.attempt_dir, verdict)

    def _open_metrics(self) -> MetricsWriter | NoMetrics:
        rank = self.rank
        if not rank.leads_drafters:
            return NoMetrics()
        return MetricsWriter(rank.config, rank.attempt_dir, self.schedule.start_step)

    def _train(self, step: int, timeout: float) -> None:
        draws = self.config.train.draws_per_row
        mine = self.schedule.of_drafter(step, self.rank.role.index)
        following = (
            self.schedule.of_drafter(step + 1, self.rank.role.index) if step + 1 < self.schedule.last_step else []
        )
        for place, index in enumerate(mine):
            with self.meter.waiting():
                batch = to_compute(self.receiver.take(index, timeout), self.dtype)
            faults.spoil_features(batch.features, step)
            batch = faults.spoil_shape(batch, step)
            for draw in range(draws):
                # Anchors depend on the micro-batch: each draw of a row is one.
                micro_batch = replace(batch, index=index * draws + draw)
                self.step.accumulate(micro_batch, last=place == len(mine) - 1 and draw == draws - 1)
            self.receiver.prefetch([*mine[place + 1 :], *following])
        self.pending.append(self.step.update(step))
        self.meter.end_step(self.receiver.paces())
        self._settle(1)

    def _settle(self, leave: int) -> None:
        """Read the results of all but the last `leave` steps: a step's numbers are read while the next one runs."""
        while len(self.pending) > leave:
            result = self.pending.popleft()
            lap = over_drafters(self.meter.lap(), self.rank.groups.votes)
            self.balance.add(lap)
            metrics = result.read() | lap
            self._judge(result.step, bool(metrics.pop("finite")), bool(metrics.pop("own_loss_finite")))
            done = result.step + 1
            self.metrics.write(done, metrics)
            if is_due(done, self.config.log.every, self.schedule.last_step):
                self.rank.journal.announce(self.progress.line(done, metrics))

    def _judge(self, step: int, finite: bool, own_finite: bool) -> None:
        """Count steps in a row without a finite gradient; the update left the weights alone on every rank.

        Steps count from 1 in what is said, as on the progress lines.
        """
        self.bad_steps = 0 if finite else self.bad_steps + 1
        if finite:
            return
        bad = find_bad_losses(self.rank, own_finite, self.schedule.of_drafter(step, self.rank.role.index))
        what = "; ".join(map(str, bad)) or "the gradient, of finite losses,"
        if self.bad_steps <= self.config.train.max_bad_steps:
            log.warning("step %d skipped: %s is not finite", step + 1, what, extra=SHARED)
        elif own_finite and bad:
            raise PeerFailed(f"{what} was not finite")  # the ranks at fault say it
        else:
            raise LauncherError(
                f"{what} was not finite at step {step + 1}, the last of {self.bad_steps} such steps in a row",
                "lower train.lr, or look at those rows",
            )

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
        self.meter.skip()

    def _evaluate(self, done: int, evaluations: set[int]) -> None:
        if done not in evaluations:
            return
        with self.rank.lifecycle.phase("eval", self.config.runtime.eval_timeout, defer_stop=True):
            self._settle(0)
            acceptance = self.evaluator.measure(done, self.step, required=done == self.schedule.last_step)
        self.meter.skip()
        if acceptance is None:
            return
        self.acceptance[done] = acceptance
        with self.rank.lifecycle.phase("save", self.config.runtime.save_timeout, defer_stop=True):
            self.checkpointer.rate(done, acceptance.length)
        self.metrics.write(done, {"eval_acceptance_length": acceptance.length, "eval_prompts": acceptance.prompts})
        self.rank.journal.announce(f"acceptance length {acceptance} after {done} steps")
