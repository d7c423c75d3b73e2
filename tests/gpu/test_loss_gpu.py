"""The fused head and loss and the master-weight update on a GPU, against float32 PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from models.loss import draft_loss, score_chunk_reference_
from models.master_weights import MasterWeights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1000, 49152, 151936, 8191])
@pytest.mark.parametrize("scale", [1.0, 40.0, 1e4])
def test_kernel_equals_reference(dtype: torch.dtype, vocabulary: int, scale: float) -> None:
    from models.loss_kernels import score_chunk_

    rows = 64
    logits = (torch.randn(rows, vocabulary, device="cuda") * scale).to(dtype)
    logits[1, 10:] = float("-inf")
    logits[2] = 3.0  # all equal: the first index is the most likely token
    labels = torch.randint(vocabulary, (rows,), device="cuda")
    labels[:4] = torch.tensor([5, 3, 0, 1])
    labels[8:16] = logits[8:16].argmax(1)
    supervised = torch.arange(rows, device="cuda") % 7 != 5
    results = []
    for score_ in (score_chunk_, score_chunk_reference_):
        scores, ce, hit = logits.clone(), *torch.full((2, rows), torch.nan, device="cuda")
        score_(scores, labels, supervised, ce, hit, True)
        results.append((scores.float(), ce, hit))
    (grad, ce, hit), (want_grad, want_ce, want_hit) = results
    assert hit.equal(want_hit)
    torch.testing.assert_close(ce, want_ce, rtol=1e-5, atol=1e-5 * scale)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4 * max(1.0, scale / 100)
    assert (grad - want_grad).norm() < tolerance * want_grad.norm()
    assert grad[~supervised].eq(0).all()


@pytest.mark.parametrize("kind", ["decay", "dpace"])
@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_loss_and_gradient_equal_float32_autograd(kind, scale: float) -> None:
    blocks, block_size, hidden_size, vocabulary = 96, 16, 512, 32000
    hidden = torch.randn(blocks * block_size, hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    head = (torch.randn(vocabulary, hidden_size, device="cuda") * scale).bfloat16()
    labels = torch.randint(vocabulary, (blocks, block_size), device="cuda")
    supervised = torch.rand(blocks, block_size, device="cuda") < 0.9
    supervised[:, 0] = False
    exact = hidden.detach().float().requires_grad_()
    logits = exact @ head.float().T
    ce = cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)
    sums = draft_loss(hidden, head, labels, supervised, kind=kind, gamma=7.0, alpha=0.5)
    (found,) = torch.autograd.grad(sums.loss, hidden)
    weights = recover_weights(ce.detach(), supervised, kind)
    (wanted,) = torch.autograd.grad((weights * ce).sum(), exact)
    torch.testing.assert_close(sums.loss, (weights * ce).sum(), rtol=5e-3, atol=1e-3)
    assert (found.float() - wanted).norm() < 1e-2 * wanted.norm()


def recover_weights(ce: torch.Tensor, supervised: torch.Tensor, kind: str) -> torch.Tensor:
    from models.loss import dpace_weights, position_weights

    if kind == "decay":
        return position_weights(ce.shape[1], 7.0, "cuda") * supervised
    weights = torch.zeros_like(ce)
    weights[:, 1:] = dpace_weights(ce[:, 1:], supervised[:, 1:], 0.5)
    return weights * supervised


def test_the_loss_keeps_no_float32_logits_and_never_waits() -> None:
    blocks, block_size, hidden_size, vocabulary = 512, 16, 512, 151936
    hidden = torch.randn(blocks * block_size, hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    head = torch.randn(vocabulary, hidden_size, device="cuda", dtype=torch.bfloat16) * 0.02
    labels = torch.randint(vocabulary, (blocks, block_size), device="cuda")
    supervised = torch.ones_like(labels, dtype=torch.bool)
    supervised[:, 0] = False
    for attempt in range(2):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            draft_loss(hidden, head, labels, supervised, kind="dpace", gamma=7.0, alpha=0.5).loss.backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.max_memory_allocated() - before < 1.5e9


def test_master_update_equals_fused_adamw_on_float32() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(300, 70), torch.nn.Linear(70, 33)).cuda()
    plain = [param.detach().clone().requires_grad_() for param in module.parameters()]
    adamw = torch.optim.AdamW(plain, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    masters = MasterWeights(module, torch.bfloat16, betas=(0.9, 0.95), weight_decay=0.1)
    weight = torch.tensor(3.0, device="cuda")
    for step in range(20):
        for param, copy in zip(module.parameters(), plain, strict=True):
            param.grad = torch.randn_like(param) * (0.01 if step % 2 else 1.0)
            copy.grad = param.grad.float() / weight
        expected = torch.nn.utils.clip_grad_norm_(plain, 1.0, foreach=True)
        adamw.step()
        torch.cuda.set_sync_debug_mode("error" if step else "default")
        try:
            norm = masters.step(1e-3, weight, 1.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.testing.assert_close(norm, expected, rtol=1e-4, atol=0)
    for param, master, copy in zip(module.parameters(), masters.masters.values(), plain, strict=True):
        torch.testing.assert_close(master, copy.detach(), rtol=1e-5, atol=1e-6)
        assert param.equal(master.bfloat16())
