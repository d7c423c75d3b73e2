"""Float32 masters beside compute-precision copies: the same numbers as AdamW, clipping and global normalisation."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from models.master_weights import MasterWeights

torch.set_num_threads(1)
OPTIONS = {"betas": (0.9, 0.95), "weight_decay": 0.1}


def make_module() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def set_gradients(module: nn.Module, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in module.parameters():
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.dtype)


def test_steps_equal_adamw_on_the_divided_and_clipped_gradient() -> None:
    module = make_module()
    plain = copy.deepcopy(module)
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-2, **OPTIONS)
    masters = MasterWeights(module, torch.float32, **OPTIONS)
    for step, scale in enumerate((0.1, 30.0, 1.0)):
        set_gradients(module, step, scale)
        set_gradients(plain, step, scale / 4)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        adamw.step()
        norm = masters.step(1e-2, torch.tensor(4.0), clip_norm=1.0)
        torch.testing.assert_close(norm, expected)
    for found, want in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)


def test_small_updates_survive_in_the_masters() -> None:
    module = make_module()
    masters = MasterWeights(module, torch.bfloat16, betas=(0.9, 0.95), weight_decay=0.0)
    before = {name: master.clone() for name, master in masters.masters.items()}
    set_gradients(module, 0)
    masters.step(1e-6, torch.tensor(1.0), clip_norm=1e9)
    for name, param in module.named_parameters():
        assert param.dtype == torch.bfloat16
        assert not masters.masters[name].equal(before[name])
        assert param.equal(masters.masters[name].bfloat16())


def test_micro_batches_add_up_in_float32() -> None:
    once, twice = make_module(), make_module()
    whole = MasterWeights(once, torch.float32, **OPTIONS)
    parts = MasterWeights(twice, torch.float32, **OPTIONS)
    set_gradients(once, 1, 2.0)
    whole.step(1e-2, torch.tensor(2.0), clip_norm=1.0)
    set_gradients(twice, 1)
    parts.fold()
    set_gradients(twice, 1)
    parts.step(1e-2, torch.tensor(2.0), clip_norm=1.0)
    for found, want in zip(twice.parameters(), once.parameters(), strict=True):
        torch.testing.assert_close(found, want)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(bad: float) -> None:
    module = make_module()
    masters = MasterWeights(module, torch.float32, **OPTIONS)
    before = copy.deepcopy((masters.masters, masters.state()))
    set_gradients(module, 0)
    next(module.parameters()).grad[0, 0] = bad  # pyrefly: ignore
    assert not masters.step(1e-2, torch.tensor(1.0), clip_norm=1.0).isfinite()
    for old, new in zip(before, (masters.masters, masters.state()), strict=True):
        assert all(old[name].equal(new[name]) for name in old)


def test_state_moves_to_another_module() -> None:
    module, other = make_module(), make_module()
    masters = MasterWeights(module, torch.bfloat16, **OPTIONS)
    set_gradients(module, 0)
    masters.step(1e-2, torch.tensor(1.0), clip_norm=1.0)
    fresh = MasterWeights(other, torch.bfloat16, **OPTIONS)
    fresh.load(masters.masters, masters.state())
    for source, into in ((module, masters), (other, fresh)):
        set_gradients(source, 1)
        into.step(1e-2, torch.tensor(1.0), clip_norm=1.0)
    assert all(a.equal(b) for a, b in zip(module.parameters(), other.parameters(), strict=True))
    assert set(masters.masters) == set(module.state_dict())
