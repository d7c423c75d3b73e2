"""The fused head and loss and the master-weight update on a GPU, against float32 PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from models import loss_reference
from models.float8 import E4M3, Head8, linear8, transpose8
from models.loss import draft_loss
from models.master_weights import MasterWeights

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [1000, 49152, 151936, 8191])
@pytest.mark.parametrize("spread", [1.0, 40.0, 1e4])
def test_kernel_equals_reference(dtype: torch.dtype, vocabulary: int, spread: float) -> None:
    from models import loss_kernels

    rows = 64
    logits = (torch.randn(rows, vocabulary, device="cuda") * spread).to(dtype)
    logits[1, 10:] = float("-inf")
    logits[2] = 3.0  # all equal: the first index is the most likely token
    labels = torch.randint(vocabulary, (rows,), device="cuda")
    labels[:4] = torch.tensor([5, 3, 0, 1])
    labels[8:16] = logits[8:16].argmax(1)
    supervised = torch.arange(rows, device="cuda") % 7 != 5
    results = []
    for kernels in (loss_kernels, loss_reference):
        scores, ce, hit = logits.clone(), *torch.full((2, rows), torch.nan, device="cuda")
        kernels.score_chunk_(scores, labels, supervised, ce, hit, True)
        results.append((scores.float(), ce, hit))
    (grad, ce, hit), (want_grad, want_ce, want_hit) = results
    assert hit.equal(want_hit)
    torch.testing.assert_close(ce, want_ce, rtol=1e-5, atol=1e-5 * spread)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4 * max(1.0, spread / 100)
    assert (grad - want_grad).norm() < tolerance * want_grad.norm()
    assert grad[~supervised].eq(0).all()
    if vocabulary % 16 == 0:
        odds, scale = torch.empty_like(logits, dtype=E4M3), torch.full((rows, 1), torch.nan, device="cuda")
        loss_kernels.score_chunk8_(logits, odds, scale, labels, supervised, ce, hit, True)
        torch.testing.assert_close(ce, want_ce, rtol=1e-5, atol=1e-5 * spread)
        softmax = torch.softmax(logits.float(), 1) * supervised[:, None]
        assert (odds.float() * scale - softmax).norm() < 0.05 * softmax.norm()


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
    # The GEMM's own rounding to bfloat16, without which large logits differ in their last digits.
    logits = logits + ((hidden @ head.T).float() - logits).detach()
    ce = cross_entropy(logits, labels.flatten(), reduction="none").view_as(labels)
    sums = draft_loss(hidden, head, labels, supervised, kind=kind, gamma=7.0, alpha=0.5)
    (found,) = torch.autograd.grad(sums.loss, hidden)
    weights = recover_weights(ce.detach(), supervised, kind)
    (wanted,) = torch.autograd.grad((weights * ce).sum(), exact)
    torch.testing.assert_close(sums.loss, (weights * ce).sum(), rtol=5e-3, atol=1e-3)
    assert (found.float() - wanted).norm() < 1e-2 * wanted.norm()


def test_float8_loss_and_gradient_are_near_bfloat16() -> None:
    blocks, block_size, hidden_size, vocabulary = 96, 16, 512, 32000
    hidden = torch.randn(blocks * block_size, hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    head = (torch.randn(vocabulary, hidden_size, device="cuda") * 0.1).bfloat16()
    labels = torch.randint(vocabulary, (blocks, block_size), device="cuda")
    supervised = torch.rand(blocks, block_size, device="cuda") < 0.9
    supervised[:, 0] = False
    results = []
    for form in (head, Head8.of(head)):
        sums = draft_loss(hidden, form, labels, supervised, kind="decay", gamma=7.0, alpha=0.5)
        results.append((sums.loss.detach(), *torch.autograd.grad(sums.loss, hidden)))
    (want, want_grad), (found, grad) = results
    torch.testing.assert_close(found, want, rtol=1e-2, atol=0)
    assert (grad - want_grad).norm() < 0.05 * want_grad.norm()


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs float8")
@pytest.mark.parametrize(("rows", "columns"), [(256, 128), (208, 48), (16, 400)])
def test_transposing_to_float8_is_the_reference(rows: int, columns: int) -> None:
    x = torch.randn(rows, columns + 16, device="cuda", dtype=torch.bfloat16)[:, :columns]
    scale = x.abs().amax().float() / 448
    found = transpose8(x, scale)
    assert found.is_contiguous() and found.dtype == E4M3
    assert torch.equal(found.float(), (x.float() / scale).to(E4M3).t().float())


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 9), reason="needs float8")
def test_float8_linear_is_near_bfloat16() -> None:
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = (torch.randn(384, 512, device="cuda") * 0.02).bfloat16().requires_grad_()
    toward = torch.randn(256, 384, device="cuda", dtype=torch.bfloat16)
    results = []
    for linear in (torch.compile(linear8, dynamic=False, fullgraph=True), torch.nn.functional.linear):
        out = linear(x, weight)
        results.append((out, *torch.autograd.grad(out, (x, weight), toward)))
    for found, want in zip(*results, strict=True):
        assert (found - want).norm() < 0.06 * want.norm()


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
