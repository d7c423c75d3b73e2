"""What a run on given GPUs should reach, from the cost model: rates, memory and traffic of every split. No torch.

Shares of the datasheet are fitted to one H200 (torch 2.11, Qwen3-8B shape): the drafter's step in bf16 and float8, its
update, FSDP2 over one rank, and the forward of a target, compiled and as transformers runs it; `tests/test_plan.py`
holds the model to those and to shapes that it was not fitted to. What comes over a network has not been measured.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from launcher.balance import Rates, possible_splits
from launcher.plan_memory import drafter_memory, target_memory
from launcher.plan_shapes import RunShape
from launcher.topology import Split
from launcher.work_model import Gpu, update_bytes

# Shares of the datasheet's rates that were reached.
COMPUTE_SHARE = {"bf16": 0.61, "float32": 0.61, "float8": 0.44}
COMPILED_TARGET_SHARE, STOCK_TARGET_SHARE = 0.61, 0.385
UPDATE_SHARE = 0.73
# Of a link: an all-reduce over NVLink moves 301 of 450 GB/s.
LINK_SHARE = 0.67
# FSDP2's casts and copies around its collectives, by parameter and step (10.8 ms for 1.05 B parameters).
SHARDING_BYTES = 36
# Seconds of a hop that a collective makes, in a node and between nodes.
HOP_SECONDS, NETWORK_HOP_SECONDS = 3e-6, 12e-6
# The control store answers this many requests a second (measured on two CPU cores), and a row takes about this many.
STORE_REQUESTS, REQUESTS_PER_ROW = 40_000, 12
# A doubling that brings less than this is where scaling ends.
DOUBLING = 1.5
# How often the nodes are doubled to see that.
DOUBLINGS = 9


@dataclass(frozen=True)
class Exchange:
    """What FSDP2 moves in one optimizer step, per rank, and what of it no compute hides. Seconds and bytes."""

    gather_bytes: float = 0.0
    reduce_bytes: float = 0.0
    network_bytes: float = 0.0
    """Of the reduction, between nodes."""
    gather: float = 0.0
    reduce: float = 0.0
    exposed: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """One split of a node, on a number of nodes."""

    split: Split
    nodes: int
    rates: Rates
    exchange: Exchange
    target_memory: float
    drafter_memory: float
    row_bytes: int
    tokens_per_row: int
    rows_per_step: int

    @property
    def target_rows(self) -> float:
        """Rows per second that all targets can make."""
        return self.rates.of_targets(self.split) * self.nodes

    @property
    def drafter_rows(self) -> float:
        """Rows per second that all drafters can take."""
        return self.rates.of_drafters(self.split) * self.nodes

    @property
    def store_rows(self) -> float:
        """Rows per second for which the control store has answers."""
        return STORE_REQUESTS / REQUESTS_PER_ROW

    @property
    def rows(self) -> float:
        return min(self.target_rows, self.drafter_rows, self.store_rows)

    @property
    def tokens(self) -> float:
        return self.rows * self.tokens_per_row

    @property
    def transfer_bytes(self) -> float:
        """Bytes per second that a target sends."""
        return self.rows * self.row_bytes / (self.split.targets * self.nodes)

    def fits(self, gpu: Gpu) -> bool:
        """Whether both roles fit a GPU's memory."""
        return max(self.target_memory, self.drafter_memory) <= gpu.memory_gb * 1e9

    @property
    def bound(self) -> str:
        """What keeps the run from being faster."""
        slowest = min(
            (self.store_rows, "control store"), (self.target_rows, "targets"), (self.drafter_rows, "drafters")
        )
        return slowest[1]


def predict(shape: RunShape, gpu: Gpu, split: Split, nodes: int) -> Prediction:
    """Rates, memory and traffic of a split."""
    drafters, shards = split.drafters * nodes, split.drafters  # a node holds the weights whole
    exchange, sharded = fsdp_exchange(shape, gpu, shards, nodes), drafters > 1
    return Prediction(
        split,
        nodes,
        Rates(target_seconds(shape, gpu, split.target_tp), drafter_seconds(shape, gpu, shards, exchange, sharded)),
        exchange,
        target_memory(shape, split.target_tp),
        drafter_memory(shape, shards, sharded),
        shape.row_bytes,
        shape.context,
        shape.accumulation * drafters,
    )


def predictions(shape: RunShape, gpu: Gpu, ranks: int, nodes: int, target_tp: int) -> list[Prediction]:
    """Every split of a node's ranks, those that fit the memory first, then by rows."""
    found = [predict(shape, gpu, split, nodes) for split in possible_splits(ranks, target_tp)]
    return sorted(found, key=lambda prediction: (not prediction.fits(gpu), -prediction.rows))


def target_seconds(shape: RunShape, gpu: Gpu, target_tp: int = 1) -> float:
    """Seconds of a row's forward, which tensor parallel ranks share evenly."""
    share = COMPILED_TARGET_SHARE if shape.target_compiled else STOCK_TARGET_SHARE
    rate = gpu.bf16_tflops * 1e12 * share * target_tp
    return shape.target.operations(shape.context, shape.visible) / rate + shared_target_seconds(shape, gpu, target_tp)


def shared_target_seconds(shape: RunShape, gpu: Gpu, target_tp: int) -> float:
    """Seconds of a row in which the ranks of a target add their parts of [S, H] up, twice a layer, hidden by nothing.

    Not measured over NVLink.
    """
    sent = 2 * (target_tp - 1) / target_tp * shape.context * shape.target.hidden * shape.itemsize
    hops = 2 * (target_tp - 1) * HOP_SECONDS
    return 2 * shape.target.layers * (sent / (gpu.link_gbs * 1e9 * LINK_SHARE) + hops)


def drafter_seconds(shape: RunShape, gpu: Gpu, shards: int, exchange: Exchange, sharded: bool = False) -> float:
    """Seconds of a row: all its draws, and its share of the update and of what FSDP2 does not hide."""
    return (
        micro_batch_seconds(shape, gpu) * shape.draws
        + (update_seconds(shape, gpu, shards, sharded) + exchange.exposed) / shape.accumulation
    )


def micro_batch_seconds(shape: RunShape, gpu: Gpu) -> float:
    return shape.work.total / _compute_rate(shape, gpu)


def update_seconds(shape: RunShape, gpu: Gpu, shards: int, sharded: bool) -> float:
    """AdamW over this rank's shard, and FSDP2's copies of the whole where it is sharded."""
    parameters = shape.work.parameters
    copies = SHARDING_BYTES * parameters * sharded
    return (update_bytes(parameters // shards) + copies) / (gpu.memory_tbs * 1e12 * UPDATE_SHARE)


def fsdp_exchange(shape: RunShape, gpu: Gpu, drafters_per_node: int, nodes: int) -> Exchange:
    """What a step moves: weights gathered once (bf16) behind forward, gradients reduced once (float32) behind the last
    backward, both inside a node; between nodes the sums of every shard's gradients, over each GPU's own card."""
    if drafters_per_node * nodes == 1:
        return Exchange()
    groups, parameters = shape.drafter.num_layers + 1, shape.work.parameters
    others = (drafters_per_node - 1) / drafters_per_node
    gather_bytes, reduce_bytes = 2 * parameters * others, 4 * parameters * others
    network_bytes = 2 * 4 * parameters / drafters_per_node * (nodes - 1) / nodes
    link, network = (rate * 1e9 * LINK_SHARE for rate in (gpu.link_gbs, gpu.network_gbs))
    hops = groups * (drafters_per_node - 1) * HOP_SECONDS
    # NCCL adds small messages up along trees: up and down again.
    network_hops = groups * 2 * math.log2(nodes) * NETWORK_HOP_SECONDS
    gather = hops + gather_bytes / link
    reduce = hops + reduce_bytes / link + network_hops + network_bytes / network
    rate = _compute_rate(shape, gpu)
    # The first group's gather and the last one's reduction have nothing to hide behind.
    hidden = min(gather * (1 - 1 / groups), shape.work.forward / rate) + min(
        reduce * (1 - 1 / groups), shape.work.backward / rate
    )
    return Exchange(gather_bytes, reduce_bytes, network_bytes, gather, reduce, gather + reduce - hidden)


def _compute_rate(shape: RunShape, gpu: Gpu) -> float:
    return gpu.tflops(shape.precision) * 1e12 * COMPUTE_SHARE[shape.precision]


@dataclass(frozen=True)
class Scaling:
    """How rows per second grow with nodes that use the best split each; every step has twice the nodes of the last."""

    steps: list[Prediction]

    @property
    def end(self) -> Prediction | None:
        """Where doubling the nodes brings less than half of what it should; None if that is not reached."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return next((before for before, after in pairs if after.rows < DOUBLING * before.rows), None)

    def reason(self, end: Prediction, gpu: Gpu) -> str:
        """Why doubling `end` brings little."""
        after = next(step for step in self.steps if step.nodes == 2 * end.nodes)
        if after.bound == "control store":
            return f"the control store on the first node answers {STORE_REQUESTS:,} requests a second"
        grown = 1e3 * (after.exchange.exposed - end.exchange.exposed)
        return (
            f"each drafter exchanges {after.exchange.network_bytes / 1e9:.1f} GB of gradients a step with other nodes"
            f" over its {gpu.network_gbs:.0f} GB/s card, {grown:.0f} ms more than compute hides"
        )


def scaling(shape: RunShape, gpu: Gpu, ranks: int, target_tp: int) -> Scaling:
    """The best split on 1, 2, 4, ... 512 nodes."""
    return Scaling([predictions(shape, gpu, ranks, 2**power, target_tp)[0] for power in range(DOUBLINGS + 1)])
