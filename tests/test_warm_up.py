"""What is done before a turn: followers trace something small, which leaves nothing behind for the gate to count."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from launcher.errors import UserError
from launcher.warm_up import compiled_or_not, is_compiling_on, rehearse_tracing, start_compiler


def test_a_rehearsal_traces_the_drafters_own_code_and_compiles_nothing() -> None:
    counters.clear()
    rehearse_tracing(torch.device("cpu"))
    assert counters["stats"]["unique_graphs"] == 3, "context, layer and final norm"
    assert counters["inductor"]["fxgraph_cache_miss"] == counters["inductor"]["fxgraph_cache_hit"] == 0


def test_a_rehearsal_is_forgotten() -> None:
    """Its graphs must not count against the recompile limit of the real layers, which are of the same code."""
    for _ in range(3):
        counters.clear()
        with torch._dynamo.config.patch(recompile_limit=1):
            rehearse_tracing(torch.device("cpu"))
        assert counters["stats"]["unique_graphs"] == 3


def test_the_compilers_keys_are_known_before_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache

    start_compiler(torch.device("cpu"))

    def hash_again(*args: object) -> None:
        raise AssertionError("hashed again")

    monkeypatch.setattr(codecache, "build_code_hash", hash_again)
    assert codecache.torch_key()


def test_nothing_is_warmed_up_where_compiling_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_compiling_on()
    assert compiled_or_not("drafter.attention=flex") == "compiled"
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert not is_compiling_on()
    assert compiled_or_not(None) == "not compiled: TORCHDYNAMO_DISABLE is set"
    with pytest.raises(UserError, match="flex needs .*TORCHDYNAMO_DISABLE=1 .* or set drafter.attention=sdpa") as bad:
        compiled_or_not("drafter.attention=flex", "drafter.attention=sdpa")
    assert bad.value.code == 78
    refused = pytest.raises(UserError, match="TORCH_COMPILE_DISABLE=1: .* unset it")
    with torch._dynamo.config.patch(disable=True), refused:  # read when torch is imported
        compiled_or_not(None)
