"""Shape of a DFlash drafter: taken from a target's configuration, written to and read from config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

ROPE_TYPES = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class DFlashConfig:
    """Everything that fixes a drafter's tensors, positions and inputs; ValueError for an impossible combination."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_parameters: dict[str, Any] | None
    """None for plain RoPE, else rope_type (linear, llama3 or yarn), rope_theta and the type's own keys."""
    vocab_size: int
    max_position_embeddings: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """0-based decoder layers whose outputs are the features, in the order of their concatenation."""
    num_target_layers: int
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.block_size < 2:
            raise ValueError(f"a drafter needs >= 1 layer and block size >= 2: {self.num_layers}, {self.block_size}")
        if self.num_heads % self.num_kv_heads or self.head_dim % 2:
            raise ValueError(
                f"heads ({self.num_heads}) must be a multiple of kv heads ({self.num_kv_heads}), "
                f"and the head size ({self.head_dim}) even"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"drafter.mask_token_id {self.mask_token_id} is outside the {self.vocab_size} embeddings")
        _check_layer_ids(self.target_layer_ids, self.num_target_layers)

    @classmethod
    def from_target(
        cls,
        target_hf_config: Any,
        *,
        layers: int,
        block_size: int,
        mask_token_id: int,
        layer_ids: Sequence[int] | None = None,
    ) -> DFlashConfig:
        """Dimensions of a drafter for a transformers target of any family (its text_config if it has one).

        Partial rotary and multi-modal RoPE keys are dropped: the drafter always rotates the whole head, and a serving
        engine would otherwise follow the target's keys. A RoPE type other than default, linear, llama3 and yarn
        becomes default with the target's theta, which is sound because the drafter is trained with it.
        `layer_ids` None means `default_layer_ids`.
        """
        text = target_hf_config.get_text_config() if hasattr(target_hf_config, "get_text_config") else target_hf_config
        hidden, heads, depth = text.hidden_size, text.num_attention_heads, text.num_hidden_layers
        theta, rope = _rope_of(text)
        return cls(
            hidden_size=hidden,
            intermediate_size=_intermediate_size(text),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or hidden // heads,
            rms_norm_eps=float(getattr(text, "rms_norm_eps", None) or 1e-6),
            rope_theta=theta,
            rope_parameters=rope,
            vocab_size=text.vocab_size,
            max_position_embeddings=getattr(text, "max_position_embeddings", None) or 32768,
            block_size=block_size,
            mask_token_id=mask_token_id,
            target_layer_ids=tuple(default_layer_ids(depth, layers) if layer_ids is None else layer_ids),
            num_target_layers=depth,
            bos_token_id=_first_set(text, target_hf_config, "bos_token_id"),
            eos_token_id=_as_ids(_first_set(text, target_hf_config, "eos_token_id")),
        )

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DFlashConfig:
        """Read a config.json of this format (ours or a published drafter's); ValueError names what is unsupported."""
        layers = raw["num_hidden_layers"]
        supported = {"hidden_act": ("silu",), "attention_bias": (False, None), "is_causal": (False, None)}
        unsupported = [f"{key} {raw[key]!r}" for key, good in supported.items() if raw.get(key, good[0]) not in good]
        unsupported += sorted({f"{kind} layers" for kind in raw.get("layer_types") or [] if kind != "full_attention"})
        if unsupported:
            raise ValueError(f"this drafter uses {', '.join(unsupported)}, which DFlashDrafter does not implement")
        inner = raw.get("dflash_config") or {}
        settings = {**raw, **inner}
        if missing := {"block_size", "mask_token_id", "num_target_layers"} - settings.keys():
            raise ValueError(f"the drafter's config.json lacks {', '.join(sorted(missing))}")
        depth = settings["num_target_layers"]
        theta, rope = _rope_from(raw.get("rope_parameters") or raw.get("rope_scaling") or {}, raw.get("rope_theta"))
        return cls(
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=layers,
            num_heads=raw["num_attention_heads"],
            num_kv_heads=raw["num_key_value_heads"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
            rms_norm_eps=raw["rms_norm_eps"],
            rope_theta=theta,
            rope_parameters=rope,
            vocab_size=raw["vocab_size"],
            max_position_embeddings=raw["max_position_embeddings"],
            block_size=settings["block_size"],
            mask_token_id=settings["mask_token_id"],
            target_layer_ids=tuple(settings.get("target_layer_ids") or default_layer_ids(depth, layers)),
            num_target_layers=depth,
            bos_token_id=raw.get("bos_token_id"),
            eos_token_id=_as_ids(raw.get("eos_token_id")),
        )

    def to_dict(self) -> dict[str, Any]:
        """config.json for transformers (the official package), SGLang and vLLM: each reads its own subset.

        RoPE is written in both forms: transformers 5 reads rope_parameters, older readers rope_theta and rope_scaling;
        with one of them missing, YaRN would be lost silently.
        """
        scaling = None
        if self.rope_parameters is not None:
            scaling = {key: value for key, value in self.rope_parameters.items() if key != "rope_theta"}
        eos = list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
            "block_size": self.block_size,
            "num_target_layers": self.num_target_layers,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.target_layer_ids),
                "block_size": self.block_size,
            },
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "initializer_range": 0.02,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rope_parameters": dict(self.rope_parameters or {"rope_type": "default", "rope_theta": self.rope_theta}),
            "layer_types": ["full_attention"] * self.num_layers,
            "sliding_window": None,
            "use_sliding_window": False,
            "max_window_layers": self.num_layers,
            "is_causal": False,
            "tie_word_embeddings": False,
            "use_cache": True,
            "bos_token_id": self.bos_token_id,
            "eos_token_id": eos,
        }


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> list[int]:
    """Target layers to tap: evenly from layer 1 to the fourth last, one per draft layer (DFlash paper's choice).

    For a target too shallow for that, fewer distinct layers, and never its last one, whose output engines and
    transformers define differently (before and after the final norm). ValueError for a target of one layer.
    """
    if num_target_layers < 2:
        raise ValueError("a target needs at least 2 layers: the last one cannot be tapped")
    if num_draft_layers == 1:
        wanted = [num_target_layers // 2]
    else:
        span = num_target_layers - 4
        wanted = [round(1 + i * span / (num_draft_layers - 1)) for i in range(num_draft_layers)]
    return sorted({min(max(layer, 0), num_target_layers - 2) for layer in wanted})


def _check_layer_ids(layer_ids: tuple[int, ...], num_target_layers: int) -> None:
    last = num_target_layers - 1
    if not layer_ids or len(set(layer_ids)) != len(layer_ids):
        raise ValueError(f"drafter.target_layer_ids must be distinct and not empty: {list(layer_ids)}")
    if bad := [layer for layer in layer_ids if not 0 <= layer < last]:
        raise ValueError(
            f"drafter.target_layer_ids {bad} are outside 0..{last - 1}: the target has {num_target_layers} layers, and "
            "the last one's output is ambiguous (before or after the final norm)"
        )


def _rope_of(text: Any) -> tuple[float, dict[str, Any] | None]:
    raw = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    return _rope_from(raw, getattr(text, "rope_theta", None))


def _rope_from(raw: dict[str, Any], theta: float | None) -> tuple[float, dict[str, Any] | None]:
    """(theta, parameters or None) from either form; entries per layer type reduce to the full-attention one."""
    raw = raw.get("full_attention") or raw
    theta = float(raw.get("rope_theta") or theta or 10_000.0)
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind not in ROPE_TYPES:
        return theta, None
    dropped = ("type", "partial_rotary_factor")
    kept = {key: value for key, value in raw.items() if key not in dropped and not key.startswith("mrope_")}
    return theta, kept | {"rope_type": kind, "rope_theta": theta}


def _intermediate_size(text: Any) -> int:
    size = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return size if isinstance(size, int) else max(size)  # some families list one per layer


def _first_set(inner: Any, outer: Any, name: str) -> Any:
    value = getattr(inner, name, None)
    return getattr(outer, name, None) if value is None else value


def _as_ids(value: int | Sequence[int] | None) -> int | tuple[int, ...] | None:
    return value if value is None or isinstance(value, int) else tuple(value)
