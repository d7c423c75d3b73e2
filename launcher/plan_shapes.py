"""The sizes that a plan counts with, from a configuration. No torch and no transformers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from launcher.config import Config
from launcher.errors import UserError
from launcher.work_model import StepShape, TargetShape, Work, step_work
from models.dflash_config import DFlashConfig
from models.shapes import find_shape
from models.target_bytes import sizes_that_divide, widths_of


@dataclass(frozen=True)
class RunShape:
    """Target, drafter and row of a run."""

    target: TargetShape
    target_compiled: bool
    drafter: DFlashConfig
    tied: bool
    context: int
    anchors: int
    precision: str
    accumulation: int
    draws: int
    rows_in_flight: int
    itemsize: int
    """Bytes of a number of the target and of the features."""
    evaluated: bool
    """Whether targets also hold the whole model, to decode held-out prompts."""
    target_sizes: tuple[int, ...]
    """Numbers of ranks that can share a target."""

    @property
    def whole_target(self) -> TargetShape:
        """The target with the layers above its last tap."""
        return replace(self.target, layers=self.drafter.num_target_layers)

    @property
    def visible(self) -> float:
        """Mean keys that a context token or the context part of a block sees, in a row of one document."""
        return self.context / 2

    @property
    def work(self) -> Work:
        """Operations of one micro-batch of the drafter."""
        return step_work(step_shape(self.drafter, self.context, self.anchors, self.visible))

    @property
    def row_bytes(self) -> int:
        """A row's features, ids, documents, positions and loss mask."""
        return self.context * (len(self.drafter.target_layer_ids) * self.drafter.hidden_size * self.itemsize + 13)


def step_shape(drafter: DFlashConfig, context: int, anchors: int, visible_context: float) -> StepShape:
    """A drafter's step in the cost model's terms."""
    return StepShape(
        context=context,
        anchors=anchors,
        block_size=drafter.block_size,
        hidden=drafter.hidden_size,
        intermediate=drafter.intermediate_size,
        layers=drafter.num_layers,
        query_width=drafter.num_heads * drafter.head_dim,
        key_width=drafter.num_kv_heads * drafter.head_dim,
        vocabulary=drafter.vocab_size,
        taps=len(drafter.target_layer_ids),
        visible=visible_context + drafter.block_size,
    )


def run_shape(config: Config) -> RunShape:
    """The shape of a run.

    Raises:
        UserError: the target's configuration is not known here, or does not fit the options.
    """
    try:
        raw = find_shape(config.target.model)
        drafter = DFlashConfig.from_target(
            SimpleNamespace(**raw),
            layers=config.drafter.layers,
            block_size=config.drafter.block_size,
            mask_token_id=0 if config.drafter.mask_token_id is None else config.drafter.mask_token_id,
            layer_ids=config.target.layer_ids,
        )
    except (ValueError, AttributeError) as error:
        raise UserError(*f"target.model: {error}".split(" -> ", 1)) from error
    train = config.train
    return RunShape(
        _target_shape(raw, drafter),
        config.target.compile is not False,
        drafter,
        bool(raw.get("tie_word_embeddings")),
        config.data.row_length,
        train.anchors,
        "bf16" if train.precision == "auto" else train.precision,
        train.accumulation,
        train.draws_per_row,
        config.topology.rows_in_flight,
        4 if config.target.dtype == "float32" else 2,
        config.eval.prompts > 0,
        _target_sizes(raw | {"num_key_value_heads": drafter.num_kv_heads}),
    )


def _target_sizes(raw: dict[str, Any]) -> tuple[int, ...]:
    """Numbers of ranks that can share a target; whether transformers has a plan for its family only a run shows."""
    wrapped = "text_config" in raw or raw.get("quantization_config")
    return (1,) if wrapped else tuple(sizes_that_divide(widths_of(raw)))


def _target_shape(raw: dict[str, Any], drafter: DFlashConfig) -> TargetShape:
    experts = raw.get("num_experts") or raw.get("num_local_experts") or raw.get("n_routed_experts") or 1
    return TargetShape(
        layers=max(drafter.target_layer_ids) + 1,
        hidden=drafter.hidden_size,
        intermediate=raw.get("moe_intermediate_size") or drafter.intermediate_size,
        query_width=drafter.num_heads * drafter.head_dim,
        key_width=drafter.num_kv_heads * drafter.head_dim,
        vocabulary=drafter.vocab_size,
        experts=experts,
        experts_per_token=raw.get("num_experts_per_tok") or 1,
    )
