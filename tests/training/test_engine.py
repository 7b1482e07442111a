"""The loop does what its config says."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F

import linvit
from linvit.errors import LinvitError
from linvit.training.alignment import AttentionAlignment
from linvit.training.average import Average, measure_batch_norm
from linvit.training.config import Config, Stage
from linvit.training.diagnosis import Diverged
from linvit.training.distillation import Distillation, Teacher
from linvit.training.engine import Engine
from linvit.training.logs import Log, read_log
from linvit.training.phases import Phase
from linvit.training.processes import make_accelerator
from tests.training.toys import PLAIN, ToySource, accuracy, cross_entropy, same, small_model, train, weights


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


def test_the_average_follows_by_its_formula() -> None:
    seen: list[dict[str, Tensor]] = []

    def watching(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        seen.append(weights(model))
        return cross_entropy(model, images, targets)

    made, _ = train(objective=watching, ema=0.8, ema_ramp=5.0, epochs=1)
    seen.append(weights(made.model))
    expected = {name: tensor.double() for name, tensor in seen[0].items()}
    for step, now in enumerate(seen[1:], start=1):
        decay = 0.8 * (1 - math.exp(-step / 5))
        expected = {name: decay * expected[name] + (1 - decay) * now[name] for name in now}
    assert made.average is not None
    for name, tensor in made.average.model.state_dict().items():
        assert torch.allclose(tensor.double(), expected[name], atol=1e-6), name
    assert not same(weights(made.model), weights(made.average.model))


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


class Poisoned(ToySource):
    """Data with one picture that is no number."""

    def epoch(self, epoch: int, skip: int = 0) -> Any:
        for step, (images, targets) in enumerate(super().epoch(epoch, skip), start=skip):
            yield (images * float("inf") if (epoch, step) == (1, 1) else images), targets


class Overflowing(nn.Module):
    """An identity until its limit of calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        Overflowing.calls += 1
        return x * (float("nan") if Overflowing.calls > 6 else 1)


def test_nan_names_the_step_and_the_layer_and_keeps_the_checkpoint(tmp_path: Path) -> None:
    model = small_model()
    model.blocks[1].mlp.drop1 = Overflowing()
    Overflowing.calls = 0
    with pytest.raises(Diverged) as stop:
        train(model, tmp_path, epochs=4, log_steps=3, checkpoint_seconds=0, evaluate=None)
    text = str(stop.value)
    assert "in step 7:" in text and "the activations of blocks.1.mlp.drop1 (Overflowing)" in text
    last = [record for record in read_log(tmp_path) if record["kind"] == "train"][-1]
    assert f"the loss was {last['loss']:.3g}, the gradient's norm {last['gradient_norm']:.3g}" in text
    assert f"the last good checkpoint is {tmp_path / 'checkpoints' / 'step-00000006.safetensors'}" in text
    assert all(torch.isfinite(p).all() for p in model.parameters()), "the bad step left the weights alone"
    assert read_log(tmp_path)[-1]["kind"] == "note"


def test_a_poisoned_batch_is_named() -> None:
    with pytest.raises(Diverged, match=r"in step 6: it began in the batch itself; .*there was no checkpoint yet"):
        train(source=Poisoned())


def test_infinite_gradients_are_named() -> None:
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * float("inf")

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        entries = cross_entropy(model, images, targets)
        return {"loss": Bad.apply(entries["loss"])}

    with pytest.raises(Diverged, match=r"in step 1: it began in the gradient of head\.bias"):
        train(objective=objective)


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


def test_batch_norm_is_measured_again() -> None:
    model = small_model("qt")
    train(model, bn_images=32, epochs=1)
    norm = next(module for module in model.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d))
    assert norm.momentum == 0.1 and int(norm.num_batches_tracked) == 4


def test_mesa_learns_from_the_average() -> None:
    records: list[dict[str, Any]] = []
    train(ema=0.5, mesa=2.0, mesa_start=0.5, log_steps=1, watch=records.append)
    mesa = [record["mesa"] for record in records if record["kind"] == "train"]
    assert mesa[:5] == [0] * 5 and min(mesa[5:]) > 0  # two steps of warm-up, and half of the six after it


def test_tensorboard_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: dict[str, list[int]] = {}

    class Board:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.setdefault(name, []).append(step)

        def close(self) -> None:
            written["closed"] = []

    monkeypatch.setattr("linvit.training.logs.tensorboard", lambda folder: Board())
    train(folder=tmp_path, log_steps=2, epochs=1)
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


def test_the_average_has_batch_norms_statistics_too() -> None:
    """As timm's: the statistics belong to the weights they were measured with."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))
    average = Average(model, 0.9, ramp=0)
    theirs = ModelEmaV3(model, decay=0.9)
    for step in range(1, 6):
        model(torch.randn(8, 3, 8, 8) * step)
        average.update(step)
        theirs.update(model)
    for name, tensor in average.model.state_dict().items():
        torch.testing.assert_close(tensor, theirs.module.state_dict()[name])
    assert not torch.equal(average.model[1].running_mean, model[1].running_mean)


def test_a_short_training_shows_what_it_learnt() -> None:
    """A decay for hundreds of thousands of steps would show the weights of the beginning."""
    average = Average(nn.Linear(2, 2), 0.99996)
    assert [average.decay_at(step) for step in (1, 90, 10**7)] == pytest.approx([2 / 11, 0.91, 0.99996])
    _, outcome = train(ema=0.99996, epochs=10)
    assert outcome.last["top1"] > 90


def test_batch_norm_is_measured_over_processes() -> None:
    norm = nn.BatchNorm1d(2)
    measure_batch_norm(norm, [torch.tensor([[1.0, 2.0], [3.0, 6.0]])], lambda statistic: statistic + 1)
    assert norm.running_mean.tolist() == [3, 5] and norm.running_var.tolist() == [3, 9]


def test_nan_is_named_in_models_with_batch_norm() -> None:
    """The bad batch has spoilt the running statistics too, which is not where it began."""
    parts = (nn.Conv2d(3, 4, 3), Overflowing(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 4))
    Overflowing.calls = 0
    with pytest.raises(Diverged, match=r"in step 7: it began in the activations of 1 \(Overflowing\)"):
        train(nn.Sequential(*parts), epochs=4, log_steps=4, evaluate=None)


def test_nan_in_a_part_of_the_next_epoch_is_named() -> None:
    """Three batches an epoch, steps of two: the second step's second part lies in the next epoch."""
    source = Poisoned(batch=8, images=24)
    with pytest.raises(Diverged, match="in step 3: it began in the batch itself"):
        train(source=source, batch_size=16, accumulate=2, log_steps=1, evaluate=None)


def test_a_failed_step_leaves_nobody_listening() -> None:
    """Else the next training of that model would stop its gradients at the layers it listens to."""
    student, original = small_model("stella"), small_model()
    objective = AttentionAlignment(Teacher(original), student, inputs="student")

    def failing(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        objective.taps.listen()
        raise RuntimeError("out of memory")

    failing.rest = objective.rest  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="out of memory"):
        train(student, objective=failing)
    assert not objective.taps.listening
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


def test_finished_stages_leave_no_optimiser() -> None:
    made, _ = train(stages=(Stage("one", epochs=1), Stage("two", epochs=1)), epochs=2)
    assert len(made.accelerator._optimizers) == 1


def test_an_accelerator_for_other_parts_is_a_mistake() -> None:
    config = Config(**PLAIN, accumulate=2)
    phases = [Phase(stage, cross_entropy) for stage in config.plan_of_stages()]
    with pytest.raises(LinvitError, match="gradient_accumulation_steps=2"):
        Engine(make_accelerator(Config(**PLAIN), "cpu"), small_model(), config, ToySource(4), phases)


def test_the_log_is_json_whatever_was_measured(tmp_path: Path) -> None:
    log = Log(tmp_path)
    log.add("train", 1, {"gradient_norm": float("inf"), "kept": {"share": [[float("nan"), 0.5]]}})
    log.close()
    text = (tmp_path / "log.jsonl").read_text()
    assert json.loads(text, parse_constant=pytest.fail)["kept"] == {"share": [[None, 0.5]]}


def test_mesa_takes_outputs_with_names() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = small_model()

        def forward(self, x: Tensor) -> Any:
            return SimpleNamespace(logits=self.inner(x))

    def objective(model: nn.Module, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": F.cross_entropy(model(images).logits, targets)}

    records: list[dict[str, Any]] = []
    settings: dict[str, Any] = {"ema": 0.5, "mesa": 1.0, "mesa_start": 0, "log_steps": 1, "evaluate": None}
    train(Named(), objective=objective, watch=records.append, **settings)
    assert [record["mesa"] for record in records if record["kind"] == "train"][-1] > 0


def test_a_teacher_without_numbers_is_named() -> None:
    teacher = small_model()
    student = small_model(seed=1)
    torch.nn.init.constant_(teacher.blocks[1].mlp.fc1.weight, float("nan"))
    objective = Distillation(Teacher(teacher), student)
    with pytest.raises(Diverged, match="in step 1: it began in the teacher's answers"):
        train(student, objective=objective, evaluate=None)
