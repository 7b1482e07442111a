"""Drop path by the recipe, on a model that exists."""

from __future__ import annotations

import pytest
import timm
import torch
from timm.layers import DropPath
from timm.models.efficientvit_mit import ResidualBlock
from torch import nn

from linvit.training.callbacks import DropPathProgress, Position
from linvit.training.config import Stage
from linvit.training.drop_path import RampedDropPath, set_drop_path
from tests.training.toys import cross_entropy, small_model, train


def rates(model: nn.Module) -> list[float]:
    return [getattr(block.drop_path1, "drop_prob", 0.0) for block in model.blocks]


def test_rates_grow_as_in_timm() -> None:
    model, theirs = small_model(depth=5), small_model(depth=5, drop_path_rate=0.2)
    assert set_drop_path(model, 0.2)
    assert rates(model) == pytest.approx(rates(theirs))
    assert rates(model) == pytest.approx([0, 0.05, 0.1, 0.15, 0.2])
    set_drop_path(model, 0.2, skip=3)
    assert rates(model) == pytest.approx([0, 0, 0, 0.15, 0.2])
    set_drop_path(model, 0)
    assert not any(isinstance(module, DropPath) for module in model.modules())


def test_a_model_without_a_place_for_it() -> None:
    assert not set_drop_path(timm.create_model("resnet10t"), 0.1)


@pytest.mark.parametrize("name", ["BeitModel", "SwinModel"])
def test_hugging_face_models_drop_what_the_recipe_says(name: str) -> None:
    """Theirs is in their config, 0.1 for some, and would be noise in an alignment."""
    from tests.conversion.hugging import BY_NAME

    model, pictures = BY_NAME[name].build(drop_path_rate=0.5).train(), BY_NAME[name].image()
    assert set_drop_path(model, 0)
    with torch.no_grad():
        once, twice = (BY_NAME[name].out(model, pictures) for _ in range(2))
    assert torch.equal(once, twice)
    assert set_drop_path(model, 0.9, rule="constant")
    with torch.no_grad():
        assert not torch.equal(BY_NAME[name].out(model, pictures), once)


def test_efficientvit_gets_a_place() -> None:
    """As EfficientViT's code does it: over the identity residuals that are not skipped, and from nothing at first."""
    torch.manual_seed(0)
    model = timm.create_model("efficientvit_b0", num_classes=3).train()
    names = list(model.state_dict())
    assert set_drop_path(model, 0.4, skip=2, rule="ramped")
    assert list(model.state_dict()) == names
    drops = [m.drop_path for m in model.stages.modules() if isinstance(m, ResidualBlock) and m.shortcut is not None]
    assert not hasattr(model.stem.res0, "drop_path"), "the stem is not dropped and does not count"
    assert [getattr(drop, "rate", 0.0) for drop in drops[:2]] == [0, 0]
    rest = len(drops) - 2
    assert [drop.rate for drop in drops[2:]] == pytest.approx([0.4 * (i + 1) / rest for i in range(rest)])
    last, ones = drops[-1], torch.ones(4000, 1, 1, 1)
    assert torch.equal(last(ones), ones)  # the training has not begun
    DropPathProgress(last).before_step(Position(Stage("train"), 5, 0, 10))
    dropped = last(ones)
    assert dropped.unique().tolist() == pytest.approx([0, 1.25]) and abs(dropped.mean() - 1) < 0.03
    assert torch.equal(last.eval()(ones), ones)
    images = torch.randn(2, 3, 64, 64)
    model.eval()
    theirs = timm.create_model("efficientvit_b0", num_classes=3).eval()
    theirs.load_state_dict(model.state_dict())
    assert torch.equal(model(images), theirs(images))


def test_the_same_rate_in_all_blocks() -> None:
    model = small_model(depth=3)
    set_drop_path(model, 0.1, rule="constant")
    assert rates(model) == [0.1, 0.1, 0.1]


def test_a_training_tells_its_progress() -> None:
    model = timm.create_model("efficientvit_b0", num_classes=4)
    set_drop_path(model, 0.1, rule="ramped")
    seen: list[float] = []

    def watching(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        seen.append(next(m.progress for m in model.modules() if isinstance(m, RampedDropPath)).item())
        return cross_entropy(model, torch.nn.functional.interpolate(images, 32), targets)

    train(model, objective=watching, evaluate=None)
    assert seen == pytest.approx([0, 0, 0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6])  # of what follows two steps of warm-up
