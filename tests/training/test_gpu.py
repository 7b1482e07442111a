"""What only a GPU shows: half precision with a scaler, compiled steps, and the same bits after a resume there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit.training.config import Config
from linvit.training.engine.loop import Diverged, Engine, Output
from linvit.training.engine.phases import Phase, without_cudnn_attention
from linvit.training.processes import make_processes
from tests.training.toys import PLAIN, Plain, ToySource, same, small_model, weights

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
    phases = [Phase(stage, Plain(loss)) for stage in config.plan_of_stages()]
    return Engine(make_processes(config), model, config, OnDevice(), phases, output=Output(folder, watch))


@pytest.mark.parametrize("keys", [64, 192, 576])
def test_gradients_of_far_logits_are_finite(keys: int) -> None:
    """cuDNN's are not, with so many keys on Hopper."""
    q, k, v = (torch.randn(2, 2, keys, 32, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q[..., 0], k[..., 0] = 1.0, -120 * 32**0.5
    for tensor in (q, k, v):
        tensor.requires_grad_()
    with without_cudnn_attention():
        F.scaled_dot_product_attention(q, k, v).sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in (q, k, v))


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


class Large(OnDevice):
    """As many tokens as a model has: with few, attention's backward pass has nothing to add in any order."""

    def epoch(self, epoch: int, skip: int = 0) -> Any:
        for images, targets in super().epoch(epoch, skip):
            yield F.interpolate(images, size=128), targets


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("plan", [None, "castling", "qt"])
def test_the_same_bits_twice_with_many_tokens(plan: str | None, precision: str) -> None:
    found = []
    for _ in range(3):
        config = Config(**{**PLAIN, **SETTINGS, "precision": precision, "compile": "off", "epochs": 8})
        model = small_model(img_size=128, embed_dim=128, num_heads=2)
        if plan:
            linvit.convert(model, plan)
        phases = [Phase(stage, Plain(objective)) for stage in config.plan_of_stages()]
        made = Engine(make_processes(config), model, config, Large(), phases)
        made.run()
        found.append(weights(made.model))
    assert same(found[0], found[1]) and same(found[0], found[2])


@pytest.mark.parametrize("plan", [None, "stella", "castling", "relu_quadratic", "mobile", "qt"])
@pytest.mark.parametrize("compile, optimiser", [("off", "adamw"), ("default", "adamw"), ("off", "muon")])
def test_a_recorded_step_has_the_same_bits(plan: str | None, compile: str, optimiser: str) -> None:
    notes: list[str] = []

    def watch(record: dict[str, Any]) -> None:
        notes.extend([record["text"]] if record["kind"] == "note" else [])

    recorded = make(plan=plan, watch=watch, precision="bf16", compile=compile, optimiser=optimiser)
    recorded.run()
    assert recorded.stepper.capture.recordings and not notes
    plain = make(plan=plan, precision="bf16", compile=compile, optimiser=optimiser, cuda_graph=False)
    plain.run()
    assert not plain.stepper.capture.recordings
    assert same(weights(recorded.model), weights(plain.model))


def test_a_step_that_asks_the_host_runs_unrecorded() -> None:
    notes: list[str] = []

    def asking(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        found = objective(model, images, targets)
        return {"loss": found["loss"] * (1.0 if found["loss"].item() < 1e9 else 0.0)}

    def watch(record: dict[str, Any]) -> None:
        notes.extend([record["text"]] if record["kind"] == "note" else [])

    made = make(loss=asking, watch=watch, precision="bf16")
    made.run()
    assert not made.stepper.capture.recordings and "runs without" in notes[0]
    plain = make(loss=asking, precision="bf16", cuda_graph=False)
    plain.run()
    assert same(weights(made.model), weights(plain.model))


@pytest.mark.parametrize("recipe", ["deit", "fast"])
def test_recorded_augmentation_is_the_augmentation(recipe: str) -> None:
    from linvit.tasks.classify.augmenting import Augmenter, Order, mixing_table
    from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
    from linvit.training.engine.phases import Replayed
    from linvit.training.recipes import recipe as named

    place = torch.device("cuda")
    preprocessing = Preprocessing.of(small_model(img_size=32), None, 1.0)
    chosen = Augmentation.of(named(recipe))
    augmenter = Augmenter(chosen, preprocessing, 4, place)
    recorded = Replayed(augmenter)
    table = mixing_table(chosen, 8, 0, 0).to(place)
    for step in range(8):
        images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8, device=place)
        labels = torch.randint(0, 4, (8,), device=place)
        given = (images, labels, *augmenter.draw(Order(8, 8), 0, step), table[step])
        for ours, wanted in zip(recorded(*given), augmenter(*given), strict=True):
            assert torch.equal(ours, wanted)
    assert recorded.recordings


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_nan_leaves_the_weights_good(precision: str) -> None:
    calls = torch.zeros((), device="cuda")

    def failing(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        calls.add_(1)  # on the device, where a recorded step counts too
        return {"loss": objective(model, images, targets)["loss"] * torch.where(calls > 5, torch.nan, 1.0)}

    made = make(loss=failing, precision=precision, log_steps=4)
    with pytest.raises(Diverged, match="in step 6: it began in the loss itself"):
        made.run()
    assert all(torch.isfinite(p).all() for p in made.model.parameters())
