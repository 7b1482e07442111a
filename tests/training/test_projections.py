"""Output projections in closed form."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import linvit
from linvit.conversion import find_hosts
from linvit.training.alignment import AttentionAlignment
from linvit.training.distillation import Teacher
from linvit.training.projections import fit_projections
from tests.conversion.families import DROP, FAMILIES
from tests.training.test_alignment import pair

BATCHES = [(torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(i)), torch.zeros(16)) for i in range(4)]


def error(teacher: Teacher, student: nn.Module) -> float:
    objective = AttentionAlignment(teacher, student)
    found = float(objective(student, BATCHES[0][0])["loss"].detach())
    objective.close()
    return found


def test_a_projection_that_was_spoilt_is_found_again() -> None:
    """Where the original's own map can be had, least squares has it."""
    teacher, _ = pair()
    student = copy.deepcopy(teacher.model).train()
    wanted = student.blocks[1].attn.proj.weight.detach().clone()
    with torch.no_grad():
        student.blocks[1].attn.proj.weight += torch.randn_like(wanted)
        student.blocks[1].attn.proj.bias += 1
    assert error(teacher, student) > 0.5
    assert fit_projections(teacher, student, BATCHES, ridge=1e-9) == [name for name, _ in find_hosts(student)]
    assert error(teacher, student) < 1e-5 and student.training
    torch.testing.assert_close(student.blocks[1].attn.proj.weight, wanted, rtol=0, atol=1e-2)


@pytest.mark.parametrize("plan", ["stella", "relu_linear", "fastformer", "castling"])
def test_converted_layers_come_closer_and_nothing_else_moves(plan: str) -> None:
    teacher, student = pair(plan)
    student.eval()  # castling as it is in use
    before, at_first = error(teacher, student), copy.deepcopy(student.state_dict())
    fit_projections(teacher, student, BATCHES)
    assert error(teacher, student) < 0.9 * before
    moved = {name for name, value in student.state_dict().items() if not torch.equal(value, at_first[name])}
    assert moved == {f"blocks.{i}.attn.proj.{part}" for i in range(3) for part in ("weight", "bias")}
    assert not student.blocks[0].attn.proj._forward_hooks and not teacher.model.blocks[0].attn._forward_hooks


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


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.model.startswith(("swin_tiny", "pvt_v2_b0", "levit_128"))])
def test_other_families(family) -> None:
    model = family.build()
    student = copy.deepcopy(model)
    linvit.convert(student, "relu_linear", drop=DROP)
    teacher, images = Teacher(model), family.image(batch=8)
    before = AttentionAlignment(teacher, student)(student, images)["loss"]
    names = fit_projections(teacher, student, [(images, images)])
    assert bool(names) == (not family.model.startswith("levit"))
    after = AttentionAlignment(teacher, student)(student, images)["loss"]
    assert after < before if names else after == before


def test_a_teacher_in_half_precision() -> None:
    """Its activations come in half precision then; the student's layers are fitted in their own."""
    teacher, student = pair("stella")
    half = Teacher(teacher.model, precision=torch.bfloat16)
    before = error(teacher, student)
    fit_projections(half, student, BATCHES)
    assert error(teacher, student) < 0.9 * before
