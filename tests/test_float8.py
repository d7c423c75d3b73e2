"""Float8 GEMMs, emulated on CPU: near the exact ones, outliers stay in their row, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import linear

from models.dflash import DFlashDrafter
from models.draft_step import DraftForward, FrozenEnds
from models.float8 import E4M3, linear8, quantize_rows, require_float8
from tests.training import CONFIG, make_batch

torch.set_num_threads(1)


def test_rows_are_scaled_one_by_one() -> None:
    x = torch.randn(4, 64)
    x[1] *= 1e6
    x[2] = 0
    values, scale = quantize_rows(x)
    assert values.dtype == E4M3 and values.is_contiguous() and scale.shape == (4, 1)
    error = (values.float() * scale - x).norm(dim=1)
    assert (error <= 0.04 * x.norm(dim=1)).all()


def test_linear_and_its_gradients_are_near_the_exact_ones() -> None:
    x, weight = torch.randn(48, 64).requires_grad_(), (torch.randn(32, 64) * 0.02).requires_grad_()
    toward = torch.randn(48, 32)
    results = [(out, *torch.autograd.grad(out, (x, weight), toward)) for out in (linear8(x, weight), linear(x, weight))]
    for found, want in zip(*results, strict=True):
        assert (found - want).norm() < 0.06 * want.norm()


def test_the_step_in_float8_is_near_the_exact_one() -> None:
    torch.manual_seed(0)
    config = replace(CONFIG, vocab_size=112)
    drafter, ends = DFlashDrafter(config), torch.randn(config.vocab_size, config.hidden_size) * 0.2
    results = []
    for float8 in (False, True):
        forward = DraftForward(drafter, FrozenEnds(ends, ends), anchors=8, backend="sdpa", float8=float8)
        sums = forward(make_batch(0))
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(sums.loss, list(drafter.parameters()))])
        results.append((sums.loss.detach(), gradient))
    (want, want_gradient), (found, gradient) = results
    torch.testing.assert_close(found, want, rtol=1e-2, atol=0)
    assert 0 < (gradient - want_gradient).norm() < 0.15 * want_gradient.norm()


@pytest.mark.parametrize(
    ("tokens", "sizes", "capability", "message"),
    [
        (8192, {"hidden_size": 4096}, (8, 0), "8.9 or newer, this one has 8.0"),
        (8190, {"hidden_size": 4096}, (9, 0), "anchors .* 8190"),
        (8192, {"hidden_size": 1000}, None, "hidden_size 1000"),
    ],
)
def test_what_float8_cannot_run_is_refused(
    tokens: int, sizes: dict[str, int], capability: tuple[int, int] | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        require_float8(tokens, sizes, capability)
    require_float8(8192, {"hidden_size": 4096}, (9, 0))
