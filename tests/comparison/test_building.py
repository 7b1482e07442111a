from __future__ import annotations

from typing import Any

import pytest
import timm
import torch

from linvit.attention import list_mechanisms
from linvit.comparison.description.building import build_model, build_softmax, read_candidate, student_of
from linvit.comparison.results import Structure
from linvit.conversion import find_hosts, load, save
from linvit.conversion.host import Host
from linvit.errors import LinvitError

FAIR: dict[str, Any] = {"model": "fair", "width": 16, "depths": [1, 1], "heads": [1, 2]}
VIT: dict[str, Any] = {"model": "vit", "width": 16, "depth": 4, "heads": 2}


def structure(candidate: str, architecture: dict[str, Any] = FAIR, **changes: Any) -> Structure:
    given = {"patch_size": 8, "size": 32, "classes": 10, **changes}
    return Structure(architecture=architecture, candidate=read_candidate(candidate), **given)


def mechanisms(model: torch.nn.Module) -> list[str]:
    return [host.mechanism.name if isinstance(host, Host) else "softmax" for _, host in find_hosts(model)]


@pytest.mark.parametrize("candidate", [*list_mechanisms(), "mixa:keep=1"])
def test_candidates_start_from_the_same_weights(candidate: str) -> None:
    model = build_model(structure(candidate), seed=3)
    softmax = build_softmax(structure("softmax"), seed=3)
    ours = dict(model.named_parameters())
    for name, tensor in softmax.named_parameters():
        assert torch.equal(ours[name], tensor), name
    assert model.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert all(".mechanism." in name for name in ours.keys() - dict(softmax.named_parameters()).keys())


def test_seeds_differ_and_repeat() -> None:
    first, again, other = (build_model(structure("agent"), seed=seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if ".mechanism." in name and first[name].std() > 0]
    assert drawn, "agent draws parameters of its own"
    assert not any(torch.equal(first[name], other[name]) for name in [*drawn, "patch_embed.proj.weight"])


def test_building_leaves_the_generator_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(1)
    torch.manual_seed(5)
    build_model(structure("agent"))
    assert torch.equal(torch.rand(1), wanted)


def test_the_pyramid_is_the_one_built_with_the_mechanism() -> None:
    """Converting gives the tensors, and the initialisation, that FairPyramid gives itself."""
    ours = build_model(structure("fastformer:variant=fair")).state_dict()
    shape = {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "patch_size": 8, "img_size": 32}
    theirs = timm.create_model("fair_pyramid_p4_aa", num_classes=10, **shape).state_dict()
    assert {name: tensor.shape for name, tensor in ours.items()} == {n: t.shape for n, t in theirs.items()}
    for name in ours:
        if ".mechanism." in name and theirs[name].ndim == 2:
            assert ours[name].std().item() == pytest.approx(theirs[name].std().item(), rel=0.5), name


def test_vit_with_and_without_class_token() -> None:
    model = build_model(structure("stella", VIT))
    assert model.cls_token is not None and mechanisms(model) == ["stella"] * 4
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    pooled = build_model(structure("window", {**VIT, "class_token": False}))
    assert pooled.cls_token is None and pooled.global_pool == "avg"
    assert pooled(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_any_timm_model_gives_up_what_the_mechanism_cannot() -> None:
    swin = {"model": "swin_tiny_patch4_window7_224", "embed_dim": 16, "depths": [1, 1], "num_heads": [1, 2]}
    model = build_model(structure("stella", {**swin, "window_size": 4}, patch_size=4, size=32))
    assert mechanisms(model) == ["stella", "stella"] and "relative_bias" in find_hosts(model)[0][1].given_up
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


@pytest.mark.parametrize("architecture", [FAIR, VIT])
def test_what_was_built_can_be_saved(tmp_path: Any, architecture: dict[str, Any]) -> None:
    model = build_model(structure("mixa:keep=1", architecture)).eval()
    save(model, tmp_path / "model")
    again, image = load(tmp_path / "model"), torch.randn(1, 3, 32, 32)
    assert torch.equal(again(image), model(image))
    assert again.pretrained_cfg["input_size"][-1] == 32


def test_measured_layers() -> None:
    teacher = build_softmax(structure("softmax", VIT))
    images = [torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))]
    wanted = structure("mixa:keep=2,layers=measured", VIT)
    student, report = student_of(teacher, wanted, calibrate=images)
    assert report.sensitivity is not None and len(report.sensitivity.keep) == 2
    quadratic = [i for i, name in enumerate(mechanisms(student)) if name == "relu_quadratic"]
    assert tuple(quadratic) == report.sensitivity.keep
    again, _ = student_of(teacher, wanted, keep=[1, 3])
    assert mechanisms(again) == ["stella", "relu_quadratic", "stella", "relu_quadratic"]
    assert mechanisms(teacher) == ["softmax"] * 4, "the teacher stays what it was"


def test_a_student_keeps_the_teachers_weights_at_another_size() -> None:
    teacher = build_softmax(structure("softmax", VIT))
    student, _ = student_of(teacher, structure("stella", VIT, patch_size=4, size=32))
    assert student.patch_embed.patch_size == (4, 4)
    assert student(torch.zeros(1, 3, 32, 32)).shape == (1, 10)
    assert torch.equal(student.blocks[0].mlp.fc1.weight, teacher.blocks[0].mlp.fc1.weight)


def test_mistakes() -> None:
    with pytest.raises(LinvitError, match="unknown model 'vits'; did you mean vit"):
        build_softmax(structure("softmax", {"model": "vits"}))
    with pytest.raises(LinvitError, match="cannot be built with"):
        build_softmax(structure("softmax", {"model": "deit_tiny_patch16_224", "widht": 3}))
    with pytest.raises(LinvitError, match="cannot keep 9 layers"):
        build_model(structure("mixa:keep=9", VIT))
