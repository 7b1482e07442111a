"""The final features of backbones of every kind, what is minimised, and image sizes by stages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F

import linvit
from linvit.errors import LinvitError
from linvit.training.callbacks import Position, StageSizes
from linvit.training.config import Config, Stage, override
from linvit.training.contract import Task
from linvit.training.objectives.final import FinalAlignment, cosines, final_features, teacher_features
from linvit.training.objectives.stages import make_dense_phases
from linvit.training.objectives.teacher import Teacher
from linvit.training.recipes import recipe
from tests.conversion.families import FAMILIES
from tests.tasks.features.pictures import backbone

IMAGES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
PATCHES = {  # of the small models of these families: what they give last, as a picture, tokens or tokens behind others
    **{"deit_tiny_distilled_patch16_224": 16, "vit_small_patch16_dinov3": 16, "swin_tiny_patch4_window7_224": 64},
    **{"sam2_hiera_tiny": 4, "samvit_base_patch16": 16, "cait_xxs24_224": 24, "coat_lite_tiny": 4, "fastvit_sa12": 4},
}


@torch.no_grad()
def test_patches_and_class_token_of_a_vit() -> None:
    model = backbone()
    found = final_features(model, IMAGES)
    tokens = model.norm(model.blocks(model._pos_embed(model.patch_embed(IMAGES))))
    assert torch.equal(found.patches, tokens[:, 3:]) and torch.equal(found.image, tokens[:, 0])
    assert torch.equal(model(IMAGES), found.image), "what the model itself gives"
    classifier = backbone(num_classes=5)
    assert torch.equal(final_features(classifier, IMAGES).image, classifier.forward_features(IMAGES)[:, 0])
    unpooled = backbone(global_pool="")
    assert torch.equal(final_features(unpooled, IMAGES).image, unpooled.forward_features(IMAGES)[:, 0])


@torch.no_grad()
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.model in PATCHES], ids=str)
def test_features_of_other_families(family: Any) -> None:
    model = family.build()
    found, width = final_features(model, family.image()), model.num_features
    assert found.patches.shape[1:] == (PATCHES[family.model], width) and found.image.shape == (2, width)
    pooled = model.forward_head(model.forward_features(family.image()), pre_logits=True)
    torch.testing.assert_close(found.image, pooled)


@torch.no_grad()
def test_hugging_faces_backbones() -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.Dinov2WithRegistersConfig(**shape, image_size=32, patch_size=8, num_register_tokens=3)
    model = transformers.Dinov2WithRegistersModel(config).eval()
    found, output = final_features(model, IMAGES), model(IMAGES)
    assert torch.equal(found.patches, output.last_hidden_state[:, 4:]) and found.patches.shape[1] == 16
    assert torch.equal(found.image, output.pooler_output)
    seen = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**shape, image_size=32, patch_size=8)).eval()
    assert torch.equal(final_features(seen, IMAGES).patches, seen(IMAGES).last_hidden_state)


def test_who_has_no_features_of_patches() -> None:
    for model in (nn.Linear(2, 2), next(f for f in FAMILIES if f.model == "pit_ti_224").build()):
        with pytest.raises(LinvitError, match="gives no features of patches: take a ViT"):
            final_features(model, torch.randn(1, 3, 64, 64))


def pair() -> tuple[Teacher, nn.Module]:
    model = backbone()
    student = copy.deepcopy(model)
    linvit.convert(student, "relu_linear")
    return Teacher(model), student


def test_the_loss_is_cosine_and_distance() -> None:
    teacher, student = pair()
    ours, theirs = final_features(student, IMAGES), final_features(teacher.model, IMAGES)
    wanted = 0.0
    for a, b in ((ours.patches, theirs.patches), (ours.image, theirs.image)):
        alike = (F.normalize(a, dim=-1) * F.normalize(b, dim=-1)).sum(-1).mean()
        wanted = wanted + (1 - alike + (a - b).square().mean() / b.var(0, correction=0).mean()) / 2
    alone, beside = FinalAlignment(teacher, student), FinalAlignment(teacher, student, blocks=0.5)
    found, more = alone(student, [IMAGES]), beside(student, [IMAGES])
    torch.testing.assert_close(found["loss"], wanted)
    torch.testing.assert_close(more["loss"], wanted + 0.5 * more["features"])
    assert more["features"] > 0 and "features" not in found
    found["loss"].backward()
    assert all(p.grad is not None for name, p in student.named_parameters() if "mask" not in name)
    assert all(p.grad is None for p in teacher.model.parameters())
    beside.close()
    assert FinalAlignment(teacher, teacher.model)(teacher.model, [IMAGES])["loss"].item() == pytest.approx(0, abs=1e-5)


def test_a_teacher_of_another_shape() -> None:
    teacher = Teacher(backbone(embed_dim=48))
    with pytest.raises(LinvitError, match=r"the teacher's features are \(16, 48\), the student's \(16, 32\): choose"):
        cosines(final_features(backbone(), IMAGES).patches, teacher_features(teacher, IMAGES).patches)


def test_a_stage_goes_through_image_sizes() -> None:
    ladder, stage = StageSizes(Task()), Stage("final", "final", 1, sizes=(8, 16, 32))
    assert ladder.change_batch([IMAGES], 3)[0].shape[-1] == 32, "before any stage"
    ladder.before_stage(Position(stage, 10, 10, 17))
    sides = [ladder.change_batch([IMAGES], step)[0].shape[-1] for step in range(10, 17)]
    assert sides == [8, 8, 8, 16, 16, 32, 32]
    ladder.before_stage(Position(Stage("other"), 17, 17, 20))
    assert ladder.change_batch([IMAGES], 18)[0].shape[-1] == 32
    config = override(recipe("fast", task="features"), ["stages.final.sizes=112,224", "size=224"])
    assert config.sides == {112, 224} and "sizes" not in config.to_dict()["stages"][0]
    with pytest.raises(LinvitError, match="a stage has images of 448 pixels, read at 224: set size=448"):
        override(config, ["stages.final.sizes=224,448"])


def test_the_recipe() -> None:
    config = recipe("fast", task="features")
    assert [(stage.name, stage.objective) for stage in config.stages] == [
        ("align", "alignment"), ("blocks", "features"), ("final", "final"),
    ]  # fmt: skip
    assert config.needs_teacher and not config.needs_labels and not config.mixup
    with pytest.raises(LinvitError, match="unknown recipe of features 'deit'"):
        recipe("deit", task="features")
    dense = Config(stages=(Stage("final", "final"),))
    with pytest.raises(LinvitError, match="objective final is of backbones"):
        make_dense_phases(dense, timm.create_model("vit_tiny_patch16_224"), nn.Linear(1, 1))


def test_a_pyramid_is_compared_at_every_stage() -> None:
    family = next(f for f in FAMILIES if f.model == "sam2_hiera_tiny")
    teacher, student, images = Teacher(family.build()), family.build(), family.image()
    linvit.convert(student, "relu_linear")
    found = final_features(student, images)
    wanted = student.forward_intermediates(images, intermediates_only=True)[:-1]
    assert [tuple(each.shape[1:]) for each in found.maps] == [(256, 16), (64, 32), (16, 64)]
    for ours, theirs in zip(found.maps, wanted, strict=True):
        assert torch.equal(ours, theirs.flatten(2).mT)
    assert not final_features(backbone(), IMAGES).maps
    FinalAlignment(teacher, student)(student, [images])["loss"].backward()
    assert all(p.grad is not None for name, p in student.named_parameters() if name.startswith("blocks"))
