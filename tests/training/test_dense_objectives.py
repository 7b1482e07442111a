"""What detectors and segmenters minimise, and the schedules and rates of their recipes."""

import copy
from typing import Any

import pytest
import timm
import torch
from torch import nn

import linvit
from linvit.errors import LinvitError
from linvit.training.config import Config, Stage
from linvit.training.contract import Objective
from linvit.training.dense_recipes import DENSE_RECIPES
from linvit.training.objectives.dense import MapAlignment, ModelLosses
from linvit.training.objectives.stages import make_dense_phases
from linvit.training.objectives.teacher import Teacher
from linvit.training.optimisation import Schedule, make_optimiser, rate_shares, stage_schedule
from linvit.training.recipes import recipe

TRUNK: dict[str, Any] = {"embed_dim": 24, "depth": 3, "num_heads": 3, "img_size": 32}


def segmenter(seed: int = 0, **args: Any) -> nn.Module:
    torch.manual_seed(seed)
    given = {"backbone": "vit_tiny_patch16_224", "backbone_args": TRUNK, "num_classes": 3, **args}
    model = timm.create_model("semantic_fpn", **given)
    with torch.no_grad():
        for block in model.backbone.trunk.blocks:  # else attention would be lost beside the residual stream
            for layer in (block.attn.qkv, block.attn.proj):
                layer.weight.mul_(10)
    return model


def batch(size: int = 64) -> tuple[torch.Tensor, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(5)
    targets = [{"size": torch.tensor([size, size]), "labels": torch.randint(3, (size, size))} for _ in range(2)]
    return torch.randn(2, 3, size, size), targets


def test_the_losses_are_the_models_own() -> None:
    model = segmenter().train()
    model.head.dropout.p = 0.0
    found = ModelLosses(model)(model, batch())
    own = model(*batch())
    torch.testing.assert_close(found["loss"], sum(own.values()))
    assert {*own} < {*found} and not found["segmentation"].requires_grad and found["loss"].requires_grad


def test_maps_are_added_with_their_weight() -> None:
    model = segmenter().train()
    model.head.dropout.p = 0.0
    original = copy.deepcopy(model)
    linvit.convert(model, "relu_linear")
    plain = ModelLosses(model)(model, batch())["loss"]
    weighed = ModelLosses(model, Teacher(original.backbone), 0.5)
    found = weighed(model, batch())
    torch.testing.assert_close(found["loss"], plain + 0.5 * found["maps"])
    assert found["maps"] > 0.01
    weighed.close()
    with pytest.raises(LinvitError, match="no backbone"):
        ModelLosses(nn.Linear(2, 2), Teacher(original.backbone), 0.5)


def test_an_original_has_its_own_maps_and_training_brings_them_back() -> None:
    model = segmenter()
    same = MapAlignment(Teacher(copy.deepcopy(model).backbone), model.backbone)
    assert same(model.backbone, batch())["loss"] < 1e-9
    same.close()
    original = copy.deepcopy(model)
    linvit.convert(model, "relu_linear")
    (phase,) = make_dense_phases(replace_stages(Stage("maps", "features", 1)), model, original)
    optimiser = torch.optim.AdamW(model.backbone.parameters(), lr=5e-3)
    images = batch()
    first = last = phase.objective(model, images)
    for _ in range(60):
        last = phase.objective(model, images)
        optimiser.zero_grad()
        last["loss"].backward()
        optimiser.step()
    assert last["maps"] < 0.4 * first["maps"]
    assert all(p.grad is None for p in model.head.parameters()), "the head is not even run"
    phase.objective.close()


def replace_stages(*stages: Stage) -> Config:
    return Config("own", stages=stages, precision="fp32")


def test_each_stage_of_fast_has_its_objective() -> None:
    model = segmenter()
    original = copy.deepcopy(model)
    linvit.convert(model, "relu_linear")
    phases = make_dense_phases(recipe("fast", task="segment"), model, original)
    assert [phase.stage.name for phase in phases] == ["align", "maps", "finetune"] and phases[1].prepare is not None
    for phase in phases:
        assert isinstance(phase.objective, Objective)
        found = phase.objective(model, batch())
        assert found["loss"] > 0 and phase.objective.repeated(model)
        phase.objective.close()
    with pytest.raises(LinvitError, match="learns from the original: give --plan"):
        make_dense_phases(recipe("fast", task="segment"), model)
    with pytest.raises(LinvitError, match="distillation=soft is for classifiers"):
        make_dense_phases(Config(distillation="soft"), model, original)


def test_step_and_poly() -> None:
    steps = Schedule(peak=1.0, steps=36, warmup=2, kind="step", drops=(27, 33))
    assert [steps(at) for at in (0, 1, 2, 26)] == [0, 0.5, 1, 1]
    assert steps(27) == pytest.approx(0.1) and steps(35) == pytest.approx(0.01)
    poly = Schedule(peak=2.0, steps=100, kind="poly", power=0.9)
    assert poly(0) == 2 and poly(50) == pytest.approx(2 * 0.5**0.9) and poly(100) == 0
    coco = recipe("mixa-coco", task="detect")
    rate = stage_schedule(coco, coco.plan_of_stages()[0], 36_000, 1000)
    assert rate(0) == 1e-7 and rate(26_999) == 1e-4 and rate(27_000) == pytest.approx(1e-5)
    assert rate(33_000) == pytest.approx(1e-6)
    with pytest.raises(LinvitError, match="set milestones="):
        Config(schedule="step")


def test_layers_learn_at_their_share() -> None:
    """MixA's decay of 0.6 over twelve layers: the last block at 0.6 of the rate, the embedding at 0.6 to the 13th."""
    model = timm.create_model(
        "semantic_fpn", backbone="vit_tiny_patch16_224", backbone_args={**TRUNK, "depth": 12}, num_classes=3
    )
    shares = rate_shares(Config(layer_decay=0.6), model)
    trunk: Any = model.backbone.trunk
    assert shares[id(trunk.blocks[11].mlp.fc1.weight)] == pytest.approx(0.6)
    assert shares[id(trunk.blocks[0].attn.qkv.weight)] == pytest.approx(0.6**12)
    assert shares[id(trunk.patch_embed.proj.weight)] == shares[id(trunk.pos_embed)] == pytest.approx(0.6**13)
    assert not any(id(p) in shares for p in model.head.parameters())
    config = Config(layer_decay=0.6, trunk_lr=0.1, lr=1.0)
    optimiser = make_optimiser(config, model, dict(model.named_parameters()))
    times = {id(p): group["times"] for group in optimiser.param_groups for p in group["params"]}
    assert times[id(trunk.blocks[11].mlp.fc1.weight)] == pytest.approx(0.06)
    assert times[id(next(model.head.parameters()))] == 1


def test_a_classifier_learns_at_the_full_rate() -> None:
    model: Any = timm.create_model("vit_tiny_patch16_224", **TRUNK)
    shares = rate_shares(Config(layer_decay=0.5), model)
    assert shares[id(model.head.weight)] == 1 and shares[id(model.blocks[2].norm1.weight)] == 0.5
    with pytest.raises(LinvitError, match="set layer_decay=none"):
        rate_shares(Config(layer_decay=0.5), nn.Linear(2, 2))


@pytest.mark.parametrize("name", DENSE_RECIPES)
def test_every_dense_recipe_says_what_is_known(name: str) -> None:
    config, text = recipe(name, task="detect"), DENSE_RECIPES[name].__doc__ or ""
    assert config.recipe == name and config == Config.from_dict(config.to_dict())
    assert ("nferred" in text) != (name in ("finetune", "fast"))
    with pytest.raises(LinvitError, match="unknown recipe to segment 'deit'"):
        recipe("deit", task="segment")


def test_published_values() -> None:
    """facts of MixA's fine-tunes: 40,000 steps of 16 of ADE20K's 20,210 images are 31.7 epochs."""
    ade, coco = recipe("mixa-ade", task="segment"), recipe("mixa-coco", task="detect")
    assert (ade.lr, ade.weight_decay, ade.batch_size, ade.size, ade.poly_power) == (2e-4, 1e-4, 16, 448, 0.9)
    assert round(ade.epochs * 20_210 / 16) == pytest.approx(40_000, abs=10)
    assert (coco.lr, coco.weight_decay, coco.layer_decay, coco.batch_size, coco.size) == (1e-4, 0.05, 0.6, 16, 448)
    assert coco.epochs == 36 and round(coco.warmup_epochs * 118_287 / 16) == pytest.approx(3000, abs=5)


def test_values_of_the_base_systems() -> None:
    """PicoDet warms up for 300 steps from a tenth of its rate; ADE20K's images keep their shape."""
    pico, swin = recipe("castling-coco", task="detect"), recipe("qtvit-coco", task="detect")
    assert pico.scaled(pico.lr) == pytest.approx(0.4 / 4) and pico.warmup_lr == pytest.approx(0.1 * 0.4 / 4)
    assert round(pico.warmup_epochs * 118_287 / 128) == pytest.approx(300, abs=1) and pico.ema == 0.9998
    assert (swin.lr, swin.weight_decay, swin.warmup_lr, swin.resize) == (1e-4, 0.05, 1e-7, "shortest")
    assert (swin.multiscale[0], swin.multiscale[-1], swin.milestones) == (480, 800, (27 / 36, 33 / 36))
    for name, rate, decay, power in (("qtvit-ade", 6e-5, 0.01, 1.0), ("castling-ade", 1e-4, 0.05, 0.9)):
        ade = recipe(name, task="segment")
        assert (ade.lr, ade.weight_decay, ade.poly_power, ade.size) == (rate, decay, power, 512)
        assert (ade.resize, ade.scale_jitter) == ("shortest", (0.5, 2.0))
        assert round(ade.epochs * 20_210 / 16) == pytest.approx(160_000, abs=10)
