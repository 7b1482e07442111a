"""Distillation: its formulas, its heads, and what a teacher may and may not be."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import linvit
from linvit.conversion.saving import note
from linvit.errors import LinvitError
from linvit.training.config import Config
from linvit.training.objectives.distillation import Distance, Distillation, Supervised, best_map, divergence
from linvit.training.objectives.stages import make_phases
from linvit.training.objectives.teacher import Activations, Teacher, check_teacher, open_teacher
from tests.training.toys import small_model

TINY: dict[str, Any] = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 24, "num_heads": 2, "num_classes": 5}
IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(4)


def vit(seed: int = 0, name: str = "vit_tiny_patch16_224", **options: Any) -> nn.Module:
    torch.manual_seed(seed)
    return timm.create_model(name, **{**TINY, **options})


def test_soft_is_hintons() -> None:
    teacher, student = vit(0), vit(1)
    found = Distillation(Teacher(teacher), student, weight=0.7, temperature=3.0)(student, (IMAGES, LABELS))
    ours, theirs = student(IMAGES), teacher(IMAGES)
    kl = F.kl_div((ours / 3).log_softmax(-1), (theirs / 3).softmax(-1), reduction="batchmean") * 9
    torch.testing.assert_close(found["loss"], 0.3 * F.cross_entropy(ours, LABELS) + 0.7 * kl)
    torch.testing.assert_close(found["distillation"], kl.detach())
    assert abs(float(divergence(theirs, theirs, 2.0))) < 1e-6


def test_hard_takes_the_teachers_choice() -> None:
    teacher, student = vit(0), vit(1)
    found = Distillation(Teacher(teacher), student, kind="hard", weight=0.5)(student, (IMAGES, LABELS))
    ours = student(IMAGES)
    wanted = F.cross_entropy(ours, LABELS) + F.cross_entropy(ours, teacher(IMAGES).argmax(-1))
    torch.testing.assert_close(found["loss"], wanted / 2)


def test_token_gives_each_head_its_own_task() -> None:
    teacher, student = vit(0), vit(1, "deit_tiny_distilled_patch16_224").train()
    smooth = Supervised(smoothing=0.1)
    objective = Distillation(Teacher(teacher), student, kind="token", supervised=smooth)
    found = objective(student, (IMAGES, LABELS))
    head, distilled = student(IMAGES)
    wanted = smooth.measure(head, LABELS) + F.cross_entropy(distilled, teacher(IMAGES).argmax(-1))
    torch.testing.assert_close(found["loss"], wanted / 2)
    with pytest.raises(LinvitError, match="training mode"):
        objective(student.eval(), (IMAGES, LABELS))
    unlabelled = Distillation(Teacher(teacher), student.train(), kind="token", weight=1.0, labelled=False)
    unlabelled(student, (IMAGES, LABELS))["loss"].backward()
    assert all(head.weight.grad.any() for head in (student.head, student.head_dist)), "both heads have a teacher"


def test_the_teacher_is_asked_and_never_changed() -> None:
    teacher, student = vit(0, drop_rate=0.5).train(), vit(1)
    before = copy.deepcopy(teacher.state_dict())
    asked = Teacher(teacher)
    torch.testing.assert_close(asked(IMAGES), asked(IMAGES))  # no dropout
    Distillation(asked, student)(student, (IMAGES, LABELS))["loss"].backward()
    assert all(p.grad is None for p in teacher.parameters()) and all(p.grad is not None for p in student.parameters())
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_the_teacher_keeps_its_precision() -> None:
    seen = []
    teacher = vit(0)
    teacher.blocks[0].mlp.fc1.register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Teacher(teacher)(IMAGES).dtype == torch.float32
        Teacher(teacher, precision=torch.bfloat16)(IMAGES)
    Teacher(teacher, precision=torch.bfloat16)(IMAGES)
    Teacher(teacher.bfloat16())(IMAGES)
    assert seen == [torch.float32, torch.bfloat16, torch.bfloat16, torch.bfloat16]


def test_features_of_the_same_width_are_compared_directly() -> None:
    teacher = vit(0)
    student = copy.deepcopy(teacher)
    names = ["blocks.0", "blocks.1.mlp"]
    objective = Distillation(Teacher(teacher), student, features=names, feature_weight=2.0)
    found = objective(student, (IMAGES, LABELS))
    assert found["features"] < 1e-9
    with torch.no_grad():
        student.blocks[0].mlp.fc2.bias += 1
    moved = objective(student, (IMAGES, LABELS))
    assert moved["features"] > 0.1
    whole = 0.5 * (moved["labels"] + moved["distillation"]) + 2 * moved["features"]
    torch.testing.assert_close(moved["loss"].detach(), whole)


def test_features_of_another_width_are_mapped_first() -> None:
    student, teacher = vit(1), vit(0, embed_dim=32)
    objective = Distillation(Teacher(teacher), student, features={"blocks.1": "blocks.0"})
    found = objective(student, (IMAGES, LABELS))
    assert 0 < found["features"] < 1  # the best map is better than the mean
    found["loss"].backward()
    assert student.blocks[1].attn.qkv.weight.grad.abs().sum() > 0
    torch.manual_seed(0)
    ours, matrix = torch.randn(6, 40, 12), torch.randn(12, 20)
    torch.testing.assert_close(best_map(ours.flatten(0, 1), (ours @ matrix).flatten(0, 1)), matrix, rtol=0, atol=0.01)
    assert Distance()(ours, ours @ matrix) < 1e-4
    picture = torch.randn(2, 12, 5, 5)
    assert Distance()(picture, torch.einsum("nchw,cd->ndhw", picture, matrix)) < 1e-4


def test_it_compiles_as_one_graph() -> None:
    teacher, student = vit(0), vit(1)
    objective = Distillation(Teacher(teacher), student, features=["blocks.0"])
    wanted = objective(student, (IMAGES, LABELS))
    step = torch.compile(lambda x, y: objective(student, (x, y)), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(step(IMAGES, LABELS), wanted)
    student.zero_grad()
    step(IMAGES, LABELS)["loss"].backward()
    assert all(p.grad is not None for p in student.parameters())


def test_hooks_are_idle_and_can_be_taken_off() -> None:
    model = vit(0)
    activations = Activations(model, ["blocks.0"], ["blocks.0"])
    model(IMAGES)
    assert activations.take() == ({}, {})
    copy.deepcopy(model)(IMAGES)
    activations.record()
    model(IMAGES)
    assert list(activations.take()[1]) == ["blocks.0"]
    activations.hooks.close()
    assert not model.blocks[0]._forward_hooks and not model.blocks[0]._forward_pre_hooks


def test_teachers_come_by_name(tmp_path: Path) -> None:
    model = vit(0)
    linvit.convert(model, "stella")
    linvit.save(model, tmp_path)
    torch.testing.assert_close(open_teacher(tmp_path)(IMAGES), model.eval()(IMAGES))
    other = open_teacher("vit_tiny_patch16_224", pretrained=False, **TINY)
    assert other.num_classes == 5
    with pytest.raises(LinvitError, match="unknown teacher 'vit_tinny_patch16_224'; did you mean"):
        open_teacher("vit_tinny_patch16_224")


def test_wrong_teachers_are_refused() -> None:
    student = vit(1)
    for message, attempt in {
        "the teacher has 9 classes, the student 5": lambda: Distillation(Teacher(vit(0, num_classes=9)), student),
        "VisionTransformer has one head": lambda: Distillation(Teacher(vit(0)), student, kind="token"),
        "unknown distillation 'sof'; did you mean soft": lambda: Distillation(Teacher(vit(0)), student, kind="sof"),
        "has no module 'block.0'": lambda: Distillation(Teacher(vit(0)), student, features=["block.0"]),
        r"features \(4, 17, 24\) and \(4, 65, 24\)": lambda: Distillation(
            Teacher(vit(0, patch_size=4)), student, features=["blocks.0"]
        )(student, (IMAGES, LABELS)),
    }.items():
        with pytest.raises(LinvitError, match=message):
            attempt()
    silent = nn.Sequential(nn.Flatten(), nn.Linear(3072, 9))
    with pytest.raises(LinvitError, match="the teacher has 9 classes, the student 5"):
        Distillation(Teacher(silent), student)(student, (IMAGES, LABELS))


def test_the_teacher_sees_its_own_colours() -> None:
    """Images are normalised for the student; another normalisation of the teacher's is put in its place."""
    student, teacher = small_model(), small_model(seed=1)
    assert Teacher(teacher, student=student).colours is None
    teacher.pretrained_cfg = {**teacher.pretrained_cfg, "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    pictures = torch.rand(2, 3, 8, 8)
    mean, std = (torch.tensor(teacher.pretrained_cfg[key]).view(3, 1, 1) for key in ("mean", "std"))
    wanted = teacher.eval()((pictures - mean) / std)
    torch.testing.assert_close(Teacher(teacher, student=student)((pictures - 0.5) / 0.5), wanted)
    assert not torch.allclose(Teacher(teacher)((pictures - 0.5) / 0.5), wanted)
    student, grey = small_model(in_chans=1), small_model(in_chans=1)
    grey.pretrained_cfg = teacher.pretrained_cfg
    found = Teacher(grey, student=student)((pictures[:, :1] - 0.5) / 0.5)  # one channel has the mean of the statistics
    torch.testing.assert_close(found, grey.eval()((pictures[:, :1] - mean.mean()) / std.mean()))
    with pytest.raises(LinvitError, match="the teacher is the student itself"):
        make_phases(Config(distillation="soft"), student, student)


def test_classes_in_another_order_are_a_mistake() -> None:
    teacher, student = small_model(), small_model()
    note(teacher, label_names=("a", "b", "c", "d"))
    check_teacher(teacher, student)  # which does not say
    note(student, label_names=("a", "c", "b", "d"))
    with pytest.raises(LinvitError, match="output 1 is b to the teacher and c to the student"):
        check_teacher(teacher, student)
