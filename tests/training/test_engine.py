"""The loop does what its config says."""

from __future__ import annotations

import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit.errors import LinvitError
from linvit.training.config import Config, Stage
from linvit.training.contract import Objective, Task
from linvit.training.engine.loop import Engine, Output, find_bad_layer
from linvit.training.engine.phases import Phase
from linvit.training.logs import Log, read_log
from linvit.training.objectives.alignment import AttentionAlignment
from linvit.training.objectives.teacher import Teacher
from linvit.training.optimisation import make_optimiser
from linvit.training.processes import make_processes
from tests.training.toys import PLAIN, Plain, ToySource, accuracy, cross_entropy, same, small_model, train, weights


def test_a_run_learns_and_leaves_its_models(tmp_path: Path) -> None:
    made, outcome = train(folder=tmp_path, epochs=8, log_steps=4)
    assert outcome.steps == 32 and outcome.last["top1"] > 60
    assert outcome.best["top1"] >= outcome.last["top1"]
    last, best = linvit.load(tmp_path / "last"), linvit.load(tmp_path / "best")
    assert same(weights(last), weights(made.model))
    assert accuracy(best)["top1"] == outcome.best["top1"]
    records = read_log(tmp_path)
    assert [r["step"] for r in records if r["kind"] == "train"] == list(range(4, 33, 4))
    assert [r["step"] for r in records if r["kind"] == "eval"] == list(range(0, 33, 4)), "and before the first step"
    seconds = [r["seconds"] for r in records]
    assert seconds[0] == 0 and seconds == sorted(seconds) and seconds[-1] < outcome.seconds
    assert all(r["images_per_second"] > 0 and math.isfinite(r["loss"]) for r in records if r["kind"] == "train")


def test_accumulation_equals_a_large_batch() -> None:
    large, _ = train(optimiser="sgd")  # AdamW would blow up the rounding of gradients that are zero
    small, _ = train(optimiser="sgd", accumulate=4)
    for one, other in zip(large.model.parameters(), small.model.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_stages_train_what_they_say() -> None:
    model = small_model("stella")
    before = weights(model)
    train(model, stages=(Stage("one", epochs=1, trainable="attention"),), epochs=1)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved and all(".attn." in name for name in moved)
    stages = (Stage("one", epochs=0.5, lr=1e-3, trainable="attention"), Stage("two", epochs=1.5))
    made, outcome = train(model, stages=stages, epochs=2)
    assert made.ends == [2, 8] and outcome.steps == 8
    assert all(p.requires_grad for p in model.parameters())


def test_a_stage_without_parameters_is_a_mistake() -> None:
    with pytest.raises(LinvitError, match="no parameter of the model is 'nothing_here'"):
        train(stages=(Stage("one", trainable="nothing_here"),))


def test_too_large_a_batch_is_a_mistake() -> None:
    with pytest.raises(LinvitError, match="no full batch of 64 images"):
        train(batch_size=64)


def test_bf16_and_sizes_by_turns() -> None:
    seen = set()

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        seen.add(images.shape[-1])
        out = model(images)
        assert out.dtype == torch.bfloat16
        return {"loss": nn.functional.cross_entropy(out.float(), targets)}

    model = small_model(dynamic_img_size=True)
    train(model, objective=objective, precision="bf16", random_sizes=(8, 12), evaluate=None, epochs=2)
    assert seen == {8, 12}


def test_tensorboard_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, list[int]] = {}

    class Board:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.setdefault(name, []).append(step)

        def close(self) -> None:
            written["closed"] = []

    begun: list[int] = []
    monkeypatch.setattr("linvit.training.logs.tensorboard", lambda folder, after: begun.append(after) or Board())
    train(folder=tmp_path, log_steps=2, epochs=1)
    train(folder=tmp_path, log_steps=2, epochs=1, resume=True)
    assert begun == [-1, 4], "what was drawn after the checkpoint is dropped"
    assert written["train/loss"] == [2, 4] and written["eval/top1"] == [0, 4] and "closed" in written


def test_settings_of_the_process_come_back() -> None:
    train(epochs=1)
    assert not torch.are_deterministic_algorithms_enabled()


class Disorderly(torch.autograd.Function):
    """The identity, whose backward pass has no deterministic algorithm, as PyTorch says it of its own."""

    strict: list[bool] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        asked = torch.are_deterministic_algorithms_enabled()
        Disorderly.strict.append(asked and not torch.is_deterministic_algorithms_warn_only_enabled())
        if Disorderly.strict[-1]:
            raise RuntimeError("disorderly_backward does not have a deterministic implementation, but you set it")
        return grad


@pytest.mark.parametrize("accumulate", [1, 2])
def test_what_has_no_deterministic_algorithm_runs_without(tmp_path: Path, accumulate: int) -> None:
    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return cross_entropy(lambda x: Disorderly.apply(model(x)), images, targets)  # type: ignore[arg-type]

    Disorderly.strict = []
    settings = {"objective": objective, "accumulate": accumulate}
    model = small_model(proj_drop_rate=0.1)
    made, outcome = train(model, tmp_path, **settings)
    assert Disorderly.strict == [True, *[False] * (outcome.steps * accumulate)]
    notes = [record["text"] for record in read_log(tmp_path) if record["kind"] == "note"]
    reason = "disorderly_backward does not have a deterministic implementation"
    assert notes == [f"a resumed run may not have the same bits: {reason}"]
    loose, _ = train(small_model(proj_drop_rate=0.1), deterministic=False, **settings)
    assert same(weights(made.model), weights(loose.model))
    assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("deterministic", [False, True])
def test_no_run_trains_on_cudnns_attention(deterministic: bool) -> None:
    seen = []

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return cross_entropy(model, images, targets)

    train(objective=objective, deterministic=deterministic)
    assert seen and not any(seen) and torch.backends.cuda.cudnn_sdp_enabled()


def test_attention_is_asked_for_its_deterministic_backward() -> None:
    """It has one, and takes it only where PyTorch may fail."""
    asked: list[bool] = []

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        output = model(images)
        output.register_hook(lambda grad: asked.append(not torch.is_deterministic_algorithms_warn_only_enabled()))
        return cross_entropy(lambda x: output, images, targets)  # type: ignore[arg-type]

    _, outcome = train(small_model(), objective=objective)
    assert asked == [True] * outcome.steps
    asked.clear()
    train(small_model(), objective=objective, deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled() and len(asked) == outcome.steps


def test_a_failed_step_leaves_nobody_recording() -> None:
    """Else the next training of that model would stop its gradients at the layers it records."""
    student, original = small_model("stella"), small_model()
    objective = AttentionAlignment(Teacher(original), student, inputs="student")

    def failing(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        objective.activations[0].record()
        raise RuntimeError("out of memory")

    made = Plain(failing)
    made.reset = objective.reset  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        train(student, objective=made)
    assert not objective.activations[0].recording
    before = weights(student)
    train(student)
    assert not torch.equal(student.blocks[0].attn.qkv.weight, before["blocks.0.attn.qkv.weight"])


def test_what_learns_after_a_training_is_what_learnt_before() -> None:
    model = small_model("stella")
    model.pos_embed.requires_grad_(False)
    train(model, stages=(Stage("one", epochs=1, trainable="attention"),), epochs=1)
    assert not model.pos_embed.requires_grad and model.head.weight.requires_grad


def test_a_stage_that_trains_what_its_loss_does_not_see() -> None:
    def blind(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": F.mse_loss(model.patch_embed(images).detach(), torch.zeros(()).expand(8, 4, 16))}

    with pytest.raises(LinvitError, match="nothing that this stage trains takes part in its loss"):
        train(objective=blind)


class Boxes(ToySource):
    """Batches as detection has them: a dict with images, and boxes inside."""

    def epoch(self, epoch: int, skip: int = 0, *, mixed: bool = True) -> Any:
        for images, targets in super().epoch(epoch, skip):
            yield {"image": images, "target": [{"boxes": 3.0 * F.one_hot(targets, 4)}]}


class Detection(Task):
    """The best weights have the lowest error; boxes grow with the images."""

    best, larger_is_better = "error", False

    def metrics(self, model: nn.Module) -> dict[str, float]:
        source = ToySource()
        return {"error": (model(source.pictures).argmax(-1) != source.labels).float().mean().item(), "other": 1.0}

    def resize(self, batch: Any, size: int) -> Any:
        factor = size / batch["image"].shape[-1]
        made = super().resize(batch, size)
        return {**made, "target": [{"boxes": one["boxes"] * factor} for one in made["target"]]}


class BoxError(Objective):
    def __init__(self) -> None:
        self.seen: set[tuple[int, float]] = set()

    def __call__(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        boxes = batch["target"][0]["boxes"]
        self.seen.add((batch["image"].shape[-1], float(boxes.max())))
        return {"loss": F.mse_loss(model(batch["image"]), boxes)}


def test_a_batch_is_any_tree_and_the_task_says_what_is_best(tmp_path: Path) -> None:
    config = Config(**{**PLAIN, "epochs": 4, "random_sizes": (8, 16), "bn_images": 16, "ema": 0.5, "log_steps": 1})
    model = small_model("qt", dynamic_img_size=True)
    objective = BoxError()
    phases = [Phase(stage, objective) for stage in config.plan_of_stages()]
    processes, output = make_processes(config, "cpu"), Output(tmp_path)
    outcome = Engine(processes, model, config, Boxes(), phases, task=Detection(), output=output).run()
    assert objective.seen == {(8, 3.0), (16, 6.0)}
    errors = [record["error"] for record in read_log(tmp_path) if record["kind"] == "eval"]
    assert outcome.best["error"] == min(errors) < max(errors)
    poisoned = {"image": torch.full((2, 3, 8, 8), torch.inf), "target": [{"boxes": torch.zeros(2, 4)}]}
    assert find_bad_layer(model, objective, poisoned) == "the batch itself"


def test_finished_stages_leave_no_optimiser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has two moments of every weight."""
    made: list[weakref.ref[torch.optim.Optimizer]] = []

    def watched(*args: Any) -> torch.optim.Optimizer:
        optimiser = make_optimiser(*args)
        made.append(weakref.ref(optimiser))
        return optimiser

    monkeypatch.setattr("linvit.training.engine.step.make_optimiser", watched)
    kept, _ = train(stages=(Stage("one", epochs=1), Stage("two", epochs=1)), epochs=2)
    gc.collect()
    assert [ref() is not None for ref in made] == [False, True] and made[1]() is kept.stepper.optimiser


def test_the_log_is_json_whatever_was_measured(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.add("train", 1, {"gradient_norm": float("inf"), "kept": {"share": [[float("nan"), 0.5]]}})
    log.close()
    text = (tmp_path / "log.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["kept"] == {"share": [[None, 0.5]]}
