"""What only a GPU shows: half precision with a scaler, compiled steps, and the same bits after a resume there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit.training.config import Config
from linvit.training.diagnosis import Diverged
from linvit.training.engine import Engine, Phase
from linvit.training.processes import make_accelerator
from tests.training.toys import PLAIN, ToySource, same, small_model, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETTINGS: dict[str, Any] = {"ema": 0.9, "epochs": 4, "log_steps": 1, "checkpoint_seconds": 0, "clip_norm": 1.0}


class OnDevice(ToySource):
    def epoch(self, epoch: int, skip: int = 0) -> Any:
        for images, targets in super().epoch(epoch, skip):
            yield images.cuda(), targets.cuda()


def objective(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return {"loss": F.cross_entropy(model(images).float(), targets)}


def make(
    folder: Path | None = None, plan: str | None = None, watch: Any = None, loss: Any = objective, **settings: Any
):
    config = Config(**{**PLAIN, **SETTINGS, **settings})
    model = small_model(plan, embed_dim=32, drop_path_rate=0.2)
    phases = [Phase(stage, loss) for stage in config.plan_of_stages()]
    return Engine(make_accelerator(config), model, config, OnDevice(), phases, folder=folder, watch=watch)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("plan", [None, "stella", "castling"])
@pytest.mark.parametrize("precision, compile", [("bf16", "off"), ("bf16", "default"), ("fp16", "off")])
def test_resume_equals_uninterrupted(tmp_path: Path, plan: str | None, precision: str, compile: str) -> None:
    settings = {"precision": precision, "compile": compile}
    whole = make(tmp_path / "whole", plan, **settings)
    whole.run()

    def stop(record: dict[str, Any]) -> None:
        if record["kind"] == "train" and record["step"] == 7:
            raise Stopped

    with pytest.raises(Stopped):
        make(tmp_path / "part", plan, stop, **settings).run()
    again = make(tmp_path / "part", plan, **settings)
    again.run(resume=True)
    assert same(weights(whole.model), weights(again.model))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_nan_leaves_the_weights_good(precision: str) -> None:
    calls = 0

    def failing(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        nonlocal calls
        calls += 1
        return {"loss": objective(model, images, targets)["loss"] * (float("nan") if calls > 5 else 1)}

    made = make(loss=failing, precision=precision, log_steps=4)
    with pytest.raises(Diverged, match="in step 6: it began in the loss itself"):
        made.run()
    assert all(torch.isfinite(p).all() for p in made.model.parameters())
