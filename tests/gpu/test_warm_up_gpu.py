"""What followers do on a GPU while they wait for their turn."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from launcher.warm_up import rehearse_tracing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_a_rehearsal_traces_flex_attention_too_and_compiles_nothing() -> None:
    for _ in range(2):  # the first is forgotten, or its graphs would count against the limit of the second
        counters.clear()
        with torch._dynamo.config.patch(recompile_limit=1):
            rehearse_tracing(torch.device("cuda"))
        assert counters["stats"]["unique_graphs"] == 4, "tables of tiles, context, layer and final norm"
        assert counters["inductor"]["fxgraph_cache_miss"] == counters["inductor"]["fxgraph_cache_hit"] == 0
        assert not counters["graph_break"]
