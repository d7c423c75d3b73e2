"""How much device memory a training step may take while its attention is block-sparse. Pure arithmetic, no torch.

Measured at the Qwen3-8B shape on an H200 (8,192 block tokens, five layers): 9.2 GB above what was allocated before the
step, sharded over one rank. Dense attention adds 24 GB in each layer that falls back to it.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.chunks import CHUNK_BYTES
from models.dflash_config import DFlashConfig

# Rounding of the allocator, mask tables, rotary tables and numbers that are kept per token.
SLACK_SHARE, SLACK_BYTES = 0.1, 128 << 20


@dataclass(frozen=True)
class StateBytes:
    """What a step keeps of weights and gradients beside what stays between steps, in bytes.

    held: there during all of forward and backward (gathered weights, sums of earlier micro-batches).
    gradients: grows during backward, while activations go.
    """

    held: int
    gradients: int


def dense_score_bytes(config: DFlashConfig, anchors: int, row_length: int) -> int:
    """Bytes that dense attention would add in one layer: float32 scores and probabilities of all heads."""
    queries = anchors * config.block_size
    return 2 * 4 * config.num_heads * queries * (row_length + queries)


def layer_bytes(config: DFlashConfig, anchors: int, row_length: int, element_bytes: int) -> int:
    """What autograd keeps of one layer whose attention is block-sparse.

    Per block token: input, residual, both norms and the output (5 H); queries before and after their norm, the
    attention's output and its copy for the next GEMM (4 heads D); keys and values likewise (4 kv D); gate, up and their
    product (3 I); the softmax's log-sums (float32, heads). Per context token: keys and values.
    """
    kept = 5 * config.hidden_size + 3 * config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    block_token = element_bytes * (kept + 4 * (heads + kv_heads)) + 4 * config.num_heads
    return anchors * config.block_size * block_token + row_length * element_bytes * 4 * kv_heads


def step_bound(
    config: DFlashConfig, anchors: int, row_length: int, element_bytes: int, state: StateBytes, vocabulary: int
) -> int:
    """Most bytes that a block-sparse step takes above what was allocated before it.

    What is held, then the greater of all activations and all gradients (the ones go as the others come), and the
    greater of a chunk of logits, before backward, and one layer's temporaries in it (as much as the layer keeps, and
    its gradients in two precisions).

    Args:
        config: the drafter's shape.
        anchors: N, blocks per row.
        row_length: S.
        element_bytes: size of a number in the compute precision.
        state: the step's own weights and gradients.
        vocabulary: rows of the head.
    """
    queries = anchors * config.block_size
    layer = layer_bytes(config, anchors, row_length, element_bytes)
    # Embeddings, the last norm and what the loss keeps of block tokens; the projected context and its norm.
    once = element_bytes * config.hidden_size * (8 * queries + 4 * row_length)
    activations = config.num_layers * layer + once
    temporaries = layer + 2 * state.gradients // config.num_layers
    logits = min(queries * vocabulary * element_bytes, CHUNK_BYTES["cuda"]) * 3 // 2
    total = state.held + max(activations, state.gradients) + max(temporaries, logits)
    return int(total * (1 + SLACK_SHARE)) + SLACK_BYTES
