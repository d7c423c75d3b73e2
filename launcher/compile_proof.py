"""What a turn at the gate has to prove about the training step it compiled.

A warm-up that "worked" proves nothing: attention may have fallen back to dense scores without a word. So a turn shows
the fused kernels by name in forward and backward, a peak of memory under the block-sparse bound, and the numbers of a
few blocks against a dense float32 reference, gradients included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.functional import embedding

from launcher.errors import LauncherError
from models.anchors import Anchors
from models.dflash import DFlashConfig, DFlashDrafter
from models.draft_step import DraftForward, RowBatch
from models.masks import dense_mask

# Relative error of the compiled step against float32, by compute precision: bf16 operands give up to about 1e-2 per
# matmul chain, float8 operands 4e-2.
TOLERANCES = {"bf16": 0.05, "float32": 2e-3, "float8": 0.2}
REFERENCE_BLOCKS = 4


class ProofError(LauncherError):
    """The compiled step is not what it should be; the message says what was missing."""


@dataclass(frozen=True)
class Proof:
    """What one turn showed. Bytes are of device memory; 0 on CPU, where they are not counted."""

    kernels: tuple[str, ...]
    peak_bytes: int
    bound_bytes: int
    dense_bytes: int
    output_error: float
    gradient_error: float
    graph_breaks: int

    def line(self) -> str:
        """One line for the console."""
        numbers = f"error {self.output_error:.1e} (gradients {self.gradient_error:.1e})"
        if not self.bound_bytes:
            return f"{numbers}, graph breaks {self.graph_breaks}"
        gb = 1e9
        return (
            f"{self.peak_bytes / gb:.1f} GB of at most {self.bound_bytes / gb:.1f}; dense would need"
            f" {self.dense_bytes / gb:.0f} GB, {len(self.kernels)} flex kernels, {numbers}"
        )


def dense_score_bytes(config: DFlashConfig, anchors: int, row_length: int) -> int:
    """Bytes that dense attention would add in one layer: float32 scores and probabilities of all heads."""
    queries = anchors * config.block_size
    return 2 * 4 * config.num_heads * queries * (row_length + queries)


def activation_bound(config: DFlashConfig, anchors: int, row_length: int, element_bytes: int) -> int:
    """Most bytes that activations of a block-sparse step may take above what was allocated before it.

    Per layer and token: what autograd keeps of the norms, projections, attention and MLP (about 12 H + 4 I + heads)
    for block tokens, keys and values for context tokens; then features and one chunk of logits, with a margin of a
    half for temporaries.
    """
    queries = anchors * config.block_size
    attention = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_block_token = 12 * config.hidden_size + 4 * config.intermediate_size + 6 * attention
    per_context_token = 8 * config.num_kv_heads * config.head_dim
    layers = config.num_layers * (queries * per_block_token + row_length * per_context_token)
    once = row_length * (len(config.target_layer_ids) + 6) * config.hidden_size + 6 * queries * config.hidden_size
    logits = 3 * min(queries, 4096) * config.vocab_size
    return int(1.5 * element_bytes * (layers + once + logits)) + (64 << 20)


def flex_kernels(run: Callable[[], None]) -> tuple[str, ...]:
    """Names of the fused attention kernels that `run` launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    return tuple(sorted({event.key for event in profiler.key_averages() if "flex_attention" in event.key}))


def require_flex_kernels(kernels: tuple[str, ...]) -> None:
    """Raise ProofError unless a forward and a backward kernel are among `kernels`."""
    backward = [name for name in kernels if "backward" in name]
    if not backward or len(backward) == len(kernels):
        side = "forward" if backward else "backward" if kernels else "forward and no backward"
        raise ProofError(
            f"no fused flex attention {side} kernel ran: attention fell back to the dense path"
            f" (kernels seen: {', '.join(kernels) or 'none'})",
            "look for suppressed compile errors (suppress_errors, error_on_nested_fx_trace, recompile limits)",
        )


def reference_errors(drafter: DFlashDrafter, forward: DraftForward, batch: RowBatch) -> tuple[float, float]:
    """Relative errors of a few blocks' hidden states and parameter gradients against dense float32.

    The compiled drafter runs at its full shapes; the loss reaches only the chosen blocks, which a float32 copy with
    dense attention computes alone. Gradients of `drafter` are used up.
    """
    inputs = forward.block_inputs(batch)
    block_size, count = forward.block_size, inputs.anchors.position_N.shape[0]
    chosen = torch.linspace(0, count - 1, min(REFERENCE_BLOCKS, count), device=batch.doc.device).long().unique()
    rows = (chosen[:, None] * block_size + torch.arange(block_size, device=batch.doc.device)).flatten()
    embeddings = embedding(inputs.ids, forward.ends.embed)
    hidden = drafter(embeddings, batch.features, batch.positions, inputs.positions, inputs.mask, forward.backend)
    generator = torch.Generator(batch.doc.device).manual_seed(0)
    probe = torch.randn(rows.shape[0], hidden.shape[1], device=hidden.device, generator=generator)
    (hidden[rows].float() * probe).sum().backward()

    reference = _float32_copy(drafter)
    anchors = Anchors(inputs.anchors.position_N[chosen], inputs.anchors.keep_N[chosen])
    mask = dense_mask(anchors, batch.doc, block_size, batch.doc.shape[0])
    # Not compiled: the class's own forward, not the instance's compiled one.
    expected = reference(
        embeddings[rows].float(), batch.features.float(), batch.positions, inputs.positions[rows], mask, "sdpa"
    )
    (expected * probe).sum().backward()
    wanted = {name: param.grad for name, param in reference.named_parameters()}
    gradient_error = 0.0
    for name, param in drafter.named_parameters():
        grad, want = param.grad, wanted[name]
        assert grad is not None and want is not None
        gradient_error = max(gradient_error, _relative(_whole(grad), want))
        param.grad = None
    return _relative(hidden[rows].detach(), expected.detach()), gradient_error


def require_close(output_error: float, gradient_error: float, precision: str) -> None:
    """Raise ProofError where an error is over the tolerance of the compute precision (gradients: twice it)."""
    limit = TOLERANCES[precision]
    if not (output_error <= limit and gradient_error <= 2 * limit):
        raise ProofError(
            f"the compiled step differs from the dense float32 reference: outputs by {output_error:.1e} (at most"
            f" {limit:.0e}), gradients by {gradient_error:.1e} (at most {2 * limit:.0e})",
            "the mask or a kernel is wrong; keep compile_report.json and open an issue",
        )


def require_bound(proof: Proof) -> None:
    """Raise ProofError where a step takes more memory than block-sparse attention can."""
    if proof.bound_bytes and proof.peak_bytes > proof.bound_bytes:
        raise ProofError(
            f"the step's activations peak at {proof.peak_bytes / 1e9:.1f} GB, over the block-sparse bound of"
            f" {proof.bound_bytes / 1e9:.1f} GB (dense scores alone are {proof.dense_bytes / 1e9:.0f} GB)",
            "attention is not block-sparse here; keep compile_report.json and open an issue",
        )


def _float32_copy(drafter: DFlashDrafter) -> DFlashDrafter:
    with torch.device("meta"):
        copy = DFlashDrafter(replace(drafter.config))
    weights = {name: _whole(weight).detach().float() for name, weight in drafter.state_dict().items()}
    copy.load_state_dict(weights, assign=True)
    copy.rotary = drafter.rotary
    return copy.requires_grad_(True)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-12))
