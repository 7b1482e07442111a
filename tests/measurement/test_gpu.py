"""What only a GPU shows of `bench model`: a compiled model as a CUDA graph."""

from __future__ import annotations

import pytest
import torch

import linvit
from linvit.measurement import model_speed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_replayed_model_is_timed_in_both_passes() -> None:
    rows = list(
        model_speed.sweep(
            "test_vit",
            lambda model, size: linvit.convert(model, "stella", size=size),
            sizes=[(64, 64)],
            batches=[8],
            dtype="bf16",
            device=torch.device("cuda"),
            modes=("compiled", "graph"),
            budget=0.1,
        )
    )
    assert len(rows) == 8 and all(row["status"] == "ok" for row in rows), rows
    times = {model_speed.key(row)[2:]: row["ms"]["median"] for row in rows}
    for which in model_speed.PASSES:  # so small a model waits for the host, which a graph does not
        assert times[which, "graph", "converted"] < times[which, "compiled", "converted"]
