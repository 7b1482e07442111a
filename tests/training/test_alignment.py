"""Alignment: what is compared, what learns from it, and that it brings accuracy back without labels."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import pytest
import timm
import torch
from torch import nn

import linvit
from linvit.conversion import Choice, Plan, Rule, find_hosts
from linvit.errors import LinvitError
from linvit.tasks.classify.data import open_data
from linvit.tasks.classify.metrics import evaluate
from linvit.tasks.classify.preprocessing import Augmentation, Preprocessing
from linvit.tasks.classify.resident import Resident, decode
from linvit.training.contract import Objective
from linvit.training.objectives.alignment import AttentionAlignment, FeatureAlignment, hosts_to_align
from linvit.training.objectives.distillation import Distillation, Supervised, relative_error
from linvit.training.objectives.teacher import Teacher
from tests.conversion.families import FAMILIES, permitting

TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 3, "embed_dim": 24, "num_heads": 2, "num_classes": 5}
IMAGES = torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def pair(plan: str = "stella", **options: Any) -> tuple[Teacher, nn.Module]:
    """A teacher with sharp attention, and its conversion."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **{**TINY, **options})
    for name, parameter in model.named_parameters():
        if "qkv" in name:
            parameter.data *= 8
    student = copy.deepcopy(model)
    linvit.convert(student, plan)
    return Teacher(model), student


def test_layers_are_compared_on_the_teachers_inputs() -> None:
    teacher, student = pair()
    objective = AttentionAlignment(teacher, student)
    errors = objective.errors(student, IMAGES)
    assert list(errors) == ["blocks.0.attn", "blocks.1.attn", "blocks.2.attn"]
    with torch.no_grad():
        x = teacher.model.patch_embed(IMAGES)
        x = teacher.model._pos_embed(x)
        for i, block in enumerate(teacher.model.blocks):
            given = block.norm1(x)
            wanted = relative_error(student.blocks[i].attn(given), block.attn(given))
            torch.testing.assert_close(errors[f"blocks.{i}.attn"].detach(), wanted)
            x = block(x)
    found = objective(student, IMAGES)
    torch.testing.assert_close(found["loss"], torch.stack(list(errors.values())).mean())
    assert found["worst"] == max(errors.values())


def test_layers_are_compared_on_the_students_inputs() -> None:
    teacher, student = pair()
    errors = AttentionAlignment(teacher, student, inputs="student").errors(student, IMAGES)
    with torch.no_grad():
        x = student._pos_embed(student.patch_embed(IMAGES))
        for i, block in enumerate(student.blocks):
            given = block.norm1(x)
            wanted = relative_error(block.attn(given), teacher.model.blocks[i].attn(given))
            torch.testing.assert_close(errors[f"blocks.{i}.attn"].detach(), wanted)
            x = block(x)


@pytest.mark.parametrize("inputs", ["teacher", "student"])
def test_each_layer_learns_from_itself_alone(inputs: str) -> None:
    teacher, student = pair()
    objective = AttentionAlignment(teacher, student, inputs=inputs)
    objective.errors(student, IMAGES)["blocks.1.attn"].backward()
    learnt = {name for name, p in student.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert learnt == {name for name, _ in student.named_parameters() if name.startswith("blocks.1.attn.")}
    student.zero_grad()
    objective(student, IMAGES)["loss"].backward()
    learnt = {name for name, p in student.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert learnt == {name for name, _ in student.named_parameters() if ".attn." in name}
    assert all(p.grad is None for p in teacher.model.parameters())


def test_kept_layers_are_left_out_and_originals_are_perfect() -> None:
    teacher, _ = pair()
    same = copy.deepcopy(teacher.model)
    assert hosts_to_align(teacher.model, same) == [name for name, _ in find_hosts(same)]
    assert AttentionAlignment(teacher, same)(same, IMAGES)["loss"] == 0
    assert FeatureAlignment(teacher, same)(same, IMAGES)["loss"] == 0
    half = copy.deepcopy(teacher.model)
    linvit.convert(half, Plan("half", None, (Rule(Choice("stella"), layers=(1,)),)))
    assert hosts_to_align(teacher.model, half) == ["blocks.1.attn"]


def test_mechanisms_that_look_at_the_grid_know_every_image_size() -> None:
    teacher, student = pair("window", dynamic_img_size=True)
    objective = AttentionAlignment(teacher, student)
    for height, width in ((32, 32), (48, 64), (32, 32)):
        images = torch.randn(2, 3, height, width)
        found = objective.errors(student, images)
        student(torch.randn(1, 3, 64, 32))  # leaves another grid behind
        torch.testing.assert_close(objective.errors(student, images), found)
    assert student.training


def test_blocks_are_compared_in_the_stream_itself() -> None:
    teacher, student = pair()
    found = FeatureAlignment(teacher, student, logits=0.5, temperature=2.0)(student, IMAGES)
    seen: dict[str, list[torch.Tensor]] = {}
    for model in (student, teacher.model):
        for i, block in enumerate(model.blocks):
            keep = seen.setdefault(f"{i}", [])
            block.register_forward_hook(lambda module, args, out, keep=keep: keep.append(out.detach()))
        model(IMAGES)
    wanted = torch.stack([relative_error(*both) for both in seen.values()]).mean()
    torch.testing.assert_close(found["features"], wanted)
    torch.testing.assert_close(found["loss"].detach(), wanted + 0.5 * found["distillation"])
    found["loss"].backward()
    assert student.blocks[0].mlp.fc1.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("inputs", ["teacher", "student"])
def test_it_compiles_as_one_graph(inputs: str) -> None:
    teacher, student = pair(depth=2)
    objective = AttentionAlignment(teacher, student, inputs=inputs)
    wanted = objective(student, IMAGES)
    step = torch.compile(lambda x: objective(student, x), backend="eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(step(IMAGES), wanted)
    step(IMAGES)["loss"].backward()
    assert student.blocks[1].attn.qkv.weight.grad.abs().sum() > 0


CHOSEN = (
    "deit_tiny_distilled",
    "swin_tiny",
    "pvt_v2_b0",
    "levit_128s",
    "mvitv2_tiny",
    "mobilevit_xxs",
    "xcit",
    "eva02_t",
)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.model.startswith(CHOSEN)], ids=str)
def test_every_family_can_be_aligned(family: Any) -> None:
    model = family.build()
    student = copy.deepcopy(model)
    linvit.convert(student, permitting("relu_linear"))
    teacher, images = Teacher(model), family.image()
    for objective in (
        AttentionAlignment(teacher, student),
        AttentionAlignment(teacher, student, inputs="student"),
        FeatureAlignment(teacher, student),
    ):
        student.zero_grad()
        found = objective(student, images)
        found["loss"].backward()
        assert found["loss"].isfinite() and found["loss"] > 0
        hosts = dict(find_hosts(student))
        for name in hosts_to_align(model, student):
            assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in hosts[name].parameters()), name
        objective.close()


def test_models_that_do_not_match_are_refused() -> None:
    teacher, student = pair()
    other = timm.create_model("vit_tiny_patch16_224", **{**TINY, "depth": 2})
    for message, attempt in {
        "'blocks.2.attn' is not in both": lambda: AttentionAlignment(teacher, other),
        "there are none": lambda: FeatureAlignment(Teacher(nn.Linear(2, 2)), nn.Linear(2, 2)),
        "unknown kind of inputs 'students'; did you mean student": lambda: AttentionAlignment(
            teacher, student, inputs="students"
        ),
    }.items():
        with pytest.raises(LinvitError, match=message):
            attempt()


def learn(model: nn.Module, objective: Objective, source: Any, epochs: int, lr: float, which: Iterable[Any]) -> None:
    optimiser = torch.optim.AdamW(list(which), lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, epochs * source.batches, pct_start=0.1)
    model.train()
    for epoch in range(epochs):
        for images, targets in source.epoch(epoch):
            optimiser.zero_grad()
            objective(model, (images, targets))["loss"].backward()
            optimiser.step()
            schedule.step()


def test_alignment_brings_accuracy_back_without_labels() -> None:
    """A small ViT on digits falls from nine right in ten to less than half when it is made linear."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224",
        img_size=8,
        patch_size=2,
        in_chans=1,
        embed_dim=32,
        num_heads=2,
        depth=3,
        mlp_ratio=1,
        num_classes=10,
        class_token=False,
        global_pool="avg",
    )
    size = Preprocessing((8, 8), (0.3,), (0.35,))
    train, validation = open_data("digits")
    plain = Augmentation(crop_scale=(1.0, 1.0), flip=0.0)
    source = Resident(decode(train, size), size, 64, 10, augmentation=plain)
    checks = Resident(decode(validation, size, training=False), size, 360, 10)
    learn(model, Supervised(), source, 15, 6e-3, model.parameters())
    best = evaluate(model, checks).top1
    assert best > 84
    student = copy.deepcopy(model)
    linvit.convert(student, "stella")
    teacher = Teacher(model)
    swapped = evaluate(student, checks, teacher=teacher)
    assert swapped.top1 < best - 15
    hosts = [p for _, host in find_hosts(student) for p in host.parameters()]
    learn(student, AttentionAlignment(teacher, student), source, 3, 3e-3, hosts)
    aligned = evaluate(student, checks, teacher=teacher)
    assert aligned.top1 > swapped.top1 + 0.6 * (best - swapped.top1)
    assert aligned.kl is not None and swapped.kl is not None and aligned.kl < 0.5 * swapped.kl
    learn(student, Distillation(teacher, student, weight=0.9, temperature=2.0), source, 1, 1e-3, student.parameters())
    assert evaluate(student, checks).top1 > best - 6
