"""Output projections in closed form."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from timm.models import vision_transformer
from torch import Tensor, nn

import linvit
from linvit.conversion import find_hosts
from linvit.training.objectives import least_squares
from linvit.training.objectives.distillation import relative_error
from linvit.training.objectives.least_squares import fit_projections, places_of, recorded
from linvit.training.objectives.teacher import Teacher
from tests.conversion.families import FAMILIES, permitting
from tests.training.test_alignment import pair

BATCHES = [(torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(i)), torch.zeros(16)) for i in range(4)]
FRESH = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(9))


def vit(**args: Any) -> nn.Module:
    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 4}
    return timm.create_model("vit_tiny_patch16_224", **small, **args)


@torch.no_grad()
def error(teacher: Teacher, student: nn.Module, images: Tensor = FRESH) -> float:
    """Of the stream after the last block, on images that nothing was fitted to."""
    training = student.training
    ours, wanted = (model.eval().forward_features(images) for model in (student, teacher.model))  # type: ignore
    student.train(training)
    return float(relative_error(ours, wanted))


@pytest.mark.parametrize("scale", [None, 0.1])
def test_maps_that_were_spoilt_are_found_again(scale: float | None) -> None:
    """Where the original's own maps can be had, least squares has them, behind a layer scale too."""
    teacher = Teacher(vit(init_values=scale))
    student = copy.deepcopy(teacher.model).train()
    wanted = copy.deepcopy(student.state_dict())
    with torch.no_grad():
        for linear in (student.blocks[1].attn.proj, student.blocks[1].mlp.fc2):
            linear.weight += torch.randn_like(linear.weight)
            linear.bias += 1
    assert error(teacher, student) > 0.05
    assert fit_projections(teacher, student, BATCHES, ridge=1e-9) == [name for name, _ in find_hosts(student)]
    assert error(teacher, student) < 1e-5 and student.training
    for name, value in student.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=0, atol=2e-2)


@pytest.mark.parametrize("plan, left", [("stella", 0.7), ("relu_linear", 0.7), ("fastformer", 0.7), ("castling", 0.9)])
def test_the_stream_comes_closer_and_nothing_else_moves(plan: str, left: float) -> None:
    teacher, student = pair(plan)
    before, at_first = error(teacher, student), copy.deepcopy(student.state_dict())
    fit_projections(teacher, student, BATCHES)
    assert error(teacher, student) < left * before
    moved = {name for name, value in student.state_dict().items() if not torch.equal(value, at_first[name])}
    maps = [f"blocks.{i}.{name}" for i in range(3) for name in ("attn.proj", "mlp.fc2")]
    assert moved == {f"{name}.{part}" for name in maps for part in ("weight", "bias")}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in student.blocks[0].modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in teacher.model.modules())


def test_fitting_on_the_way_is_better_than_each_layer_on_its_own() -> None:
    """On the teacher's inputs every layer is as good as it can be, and the errors add up all the same."""
    teacher, student = pair("stella")
    apart = copy.deepcopy(student)
    for block in range(3):
        alone = copy.deepcopy(teacher.model)
        alone.blocks[block].attn = copy.deepcopy(student.blocks[block].attn)
        fit_projections(teacher, alone, BATCHES)
        apart.blocks[block].attn.load_state_dict(alone.blocks[block].attn.state_dict())
    fit_projections(teacher, student, BATCHES)
    assert error(teacher, student) < 0.9 * error(teacher, apart)


@torch.no_grad()
def first_layer(model: nn.Module) -> Tensor:
    return recorded(Teacher(model), [], ["blocks.0.attn"], FRESH)["blocks.0.attn"]


def test_blocks_that_add_in_another_way_get_their_layers_fitted() -> None:
    model = vit(block_fn=vision_transformer.ResPostBlock)
    student, teacher = copy.deepcopy(model), Teacher(model)
    linvit.convert(student, "relu_linear")
    before = relative_error(first_layer(student), first_layer(model))
    names = fit_projections(teacher, student, BATCHES)
    assert len(names) == 3 and not any(place.attention_adds for place in places_of(teacher, names, FRESH))
    assert relative_error(first_layer(student), first_layer(model)) < 0.8 * before


def test_a_block_without_a_projection_of_its_own_is_left_alone() -> None:
    model = vit(block_fn=vision_transformer.ParallelScalingBlock)
    student, teacher = copy.deepcopy(model), Teacher(model)
    linvit.convert(student, "relu_linear")
    before = copy.deepcopy(student.state_dict())
    assert fit_projections(teacher, student, BATCHES) == []
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())


def test_more_images_than_asked_for_are_not_read() -> None:
    teacher, student = pair()
    read = []

    def batches():
        for batch in BATCHES:
            read.append(len(batch[0]))
            yield batch

    fit_projections(teacher, student, batches(), images=20)
    assert read == [16, 16]
    untouched = copy.deepcopy(student.state_dict())
    fit_projections(teacher, student, [])
    assert all(torch.equal(value, untouched[name]) for name, value in student.state_dict().items())


@pytest.mark.parametrize("images", [2, 5, 64])
def test_no_more_images_pass_than_there_is_room_for(images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher, student = pair("stella")
    seen: list[int] = []
    student.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    tokens = 3 * 2 * student.pos_embed.shape[1]  # recorded twice a block, and three times as much is held
    room = images * 4 * tokens * student.embed_dim * len(student.blocks)
    monkeypatch.setattr(least_squares, "ROOM", (0.0, room))
    fit_projections(teacher, student, BATCHES)
    assert seen == [images]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.model.startswith(("swin_tiny", "pvt_v2_b0", "levit_128"))])
def test_other_families(family) -> None:
    model = family.build()
    student = copy.deepcopy(model)
    linvit.convert(student, permitting("relu_linear"))
    teacher, images = Teacher(model), family.image(batch=8)
    before = relative_error(student.eval()(images), model.eval()(images))
    names = fit_projections(teacher, student, [(images, images)])
    assert bool(names) == (not family.model.startswith("levit"))
    after = relative_error(student.eval()(images), model.eval()(images))
    assert after < before if names else after == before


def test_a_teacher_in_half_precision() -> None:
    """Its activations come in half precision then; the student's layers are fitted in their own."""
    teacher, student = pair("stella")
    half = Teacher(teacher.model, precision=torch.bfloat16)
    before = error(teacher, student)
    fit_projections(half, student, BATCHES)
    assert error(teacher, student) < 0.7 * before


@pytest.mark.parametrize("name", ["ViTModel", "Dinov2Model", "DINOv3ViTModel", "SiglipVisionModel", "SamVisionModel"])
def test_hugging_face_blocks_are_known_by_their_names(name: str) -> None:
    from tests.conversion.hugging import BY_NAME

    case = BY_NAME[name]
    model = case.build()
    student = copy.deepcopy(model)
    linvit.convert(student, permitting("relu_linear"))
    teacher, images = Teacher(model), torch.randn(16, 3, case.side, case.side)
    with torch.no_grad():
        before = relative_error(case.out(student, images), case.out(model, images))
        names = fit_projections(teacher, student, [(images, images)])
        places = places_of(teacher, names, images)
        assert len(names) == 2 and all(place.attention_adds and place.mlp_adds for place in places[-1:])
        assert relative_error(case.out(student, images), case.out(model, images)) < 0.9 * before
