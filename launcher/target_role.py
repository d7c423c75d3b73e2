"""A target rank: runs the frozen model over packed rows and hands the features to the drafters."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

from torch import Tensor

from launcher import faults
from launcher.acceptance import answer_evaluation, evaluation_steps
from launcher.barrier import OrderedTurns
from launcher.compile_cache import list_files_soon
from launcher.compile_report import TurnBook, TurnReport
from launcher.data import PackedRows, eval_prompts, prepare_rows, row_order
from launcher.deadlines import lock_patience, row_patience
from launcher.rank import Models, Rank, agree_schedule, describe_models
from launcher.recompiles import Recompiles
from launcher.same_rows import publish_rows, rows_key
from launcher.schedule import Schedule
from launcher.target_gate import pass_target_gate
from launcher.target_loading import load_target
from launcher.target_team import SharedRows, TargetTeam
from launcher.transfer import RowSender
from launcher.transport_choice import make_transport
from launcher.warm_up import is_compiling_on, start_compiler
from models.draft_step import RowBatch
from models.target import TappedTarget
from models.target_files import user_cache


def run_target(rank: Rank, drafter_turns: OrderedTurns, target_turns: OrderedTurns) -> None:
    """Load, pass the gate if compiled, produce this target's rows until the last step, answer evaluations between."""
    config, runtime = rank.config, rank.config.runtime
    with rank.lifecycle.phase("load", runtime.load_timeout):
        models = describe_models(config)
        rows = open_rows(rank, models)
        prompts = held_out_prompts(rank, models)
        team = TargetTeam(rank)
        target = load_target(rank, models, team)
    producer = RowProducer(rank, models, rows, target, team)
    if config.target.compile:
        producer.compile(target_turns)
    with rank.lifecycle.phase("gate", max(drafter_turns.limit, target_turns.limit)):
        drafter_turns.join()
        if config.target.compile:
            target_turns.join()
    if config.dry_run:
        return
    if rank.leads_node and rank.cache_folder is not None:
        list_files_soon(rank.cache_folder)
    schedule = agree_schedule(rank)
    evaluations = evaluation_steps(config.eval, schedule)
    for step in range(schedule.start_step, schedule.last_step + 1):
        rank.lifecycle.step = step
        if step in evaluations:
            producer.drain()
            answer_evaluation(rank, step, models, prompts, team)
        if step == schedule.last_step or not producer.produce(schedule, step):
            break
    producer.drain()
    producer.close()


def open_rows(rank: Rank, models: Models) -> PackedRows:
    """The packed rows; one rank per node builds them, the others open the finished files."""
    if not rank.leads_node:
        timeout = rank.config.runtime.load_timeout
        rank.wait_for(rows_key(rank.role.node), "the node's first rank to pack the rows", timeout)
        return prepare_rows(rank.config.data, models.tokenizer, user_cache())
    rows = prepare_rows(rank.config.data, models.tokenizer, user_cache(), lock_patience(rank.config.runtime))
    publish_rows(rank, rows)
    return rows


def held_out_prompts(rank: Rank, models: Models) -> list[list[int]]:
    """Token ids of the prompts to decode in evaluations, with a notice where there are fewer than asked for."""
    data, wanted = rank.config.data, rank.config.eval.prompts
    prompts = eval_prompts(data, models.tokenizer, wanted) if wanted else []
    if len(prompts) < wanted:
        source = "data.holdout" if data.eval_path is None else "data.eval_path"
        line = f"eval.prompts asks for {wanted} held-out prompts, {source} gives {len(prompts)}"
        rank.journal.announce(line, every_rank=rank.leads_node)
    return prompts


class RowProducer:
    """Rows in, features out, up to `topology.rows_in_flight` rows ahead of the drafters."""

    def __init__(self, rank: Rank, models: Models, rows: PackedRows, target: TappedTarget, team: TargetTeam) -> None:
        self._rank, self._layout, self._rows, self._target, self._team = rank, models.layout, rows, target, team
        self._recompiles: Recompiles | None = None  # from the gate on, where layers are compiled
        self._patience = row_patience(rank.config.runtime)
        self._sender = self._make_sender() if team.leads else SharedRows(self._layout.buffer(rank.torch_device))

    def _make_sender(self) -> RowSender:
        rank, groups, timeout = self._rank, self._rank.groups, self._rank.config.runtime.step_timeout
        transport = make_transport(groups.rows_backend, groups.rows, rank.torch_device, timeout, rank.control)
        slots = rank.config.topology.rows_in_flight
        return RowSender(self._layout, slots, rank.torch_device, transport, rank.control, rank.lifecycle)

    def compile(self, turns: OrderedTurns) -> None:
        """Pass the gate by running the first row as training will; from then on a recompile is an error."""

        def run_row() -> RowBatch:
            buffer = self._layout.buffer(self._rank.torch_device)
            self._fill(buffer, 0)
            return self._layout.batch(0, buffer)

        rank = self._rank
        with rank.lifecycle.phase("load", rank.config.runtime.load_timeout):
            if is_compiling_on():
                start_compiler(rank.torch_device)
        announce = partial(rank.journal.announce, every_rank=self._team.leads)
        turn = self._team.turn(turns)
        pass_target_gate(rank.role.rank, turn, self._target, run_row, announce, self._record)
        self._recompiles = Recompiles(rank.config.compile.on_recompile, rank.control)

    def _record(self, report: TurnReport) -> None:
        """Hand the turn in for compile_report.json; a target has one, whatever the number of its ranks."""
        if self._team.leads:
            rank = self._rank
            header = {"turns_order": rank.config.compile.turns, "attention": rank.config.target.attention}
            path = rank.config.runtime.run_dir / "compile_report.json"
            TurnBook(path, rank.control, rank.gate_ranks, header).add(report)

    def produce(self, schedule: Schedule, step: int) -> bool:
        """This target's rows of one step; False when the run stops."""
        with self._rank.lifecycle.phase("step", self._patience, defer_stop=True):
            for index, drafter_rank in schedule.of_target(self._rank.role.index, step):
                buffer = self._buffer(index)
                if buffer is None:
                    return False
                header = self._fill(buffer, index)
                self._sender.offer(index, drafter_rank, buffer, header)
        return True

    def _buffer(self, index: int) -> Tensor | None:
        """A buffer on every rank of this target, or None on all of them: the run stops."""
        buffer = self._sender.slot(self._ended, self._patience)
        going = self._team.agree(lambda: buffer is not None, f"go on with row {index}", self._patience)
        return buffer if going else None

    def drain(self) -> None:
        """Wait until the drafters have taken every row."""
        with self._rank.lifecycle.phase("step", self._patience, defer_stop=True):
            self._sender.drain(self._ended, self._patience)

    def close(self) -> None:
        """Give the rows' memory back, once the drafters that map it have let go."""
        with self._rank.lifecycle.phase("step", self._patience, defer_stop=True):
            self._sender.close(self._ended, self._patience)

    def _fill(self, buffer: Tensor, index: int) -> dict[str, object]:
        row = self._rows.row(row_order(len(self._rows), self._rank.config.train.seed, index))
        self._layout.write(buffer, row)
        batch = self._layout.batch(index, buffer)
        with self._recompiles.watch("the target") if self._recompiles else nullcontext():
            self._target(batch.ids, batch.doc, batch.positions, out=batch.features)
        return faults.spoil_header(self._layout.header(index, row.ids), self._rank.lifecycle.step)

    def _ended(self) -> bool:
        return self._rank.control.has("ended")
