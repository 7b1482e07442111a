"""The papers' recipes train the papers' own models, which can be saved and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch

import linvit
from linvit.errors import LinvitError
from linvit.tasks import train
from linvit.tasks.classify.data import Images
from linvit.training.config import override
from linvit.training.recipes import recipe
from tests.tasks.classify.pictures import photographs
from tests.training.toys import small_model

FEW = ["batch_size=4", "precision=fp32", "epochs=1", "warmup_epochs=0.25", "lr_batch=none", "lr=1e-4"]


def eight() -> Images:
    pictures = [(picture, place % 4) for place, picture in enumerate(photographs())]
    return Images("eight", pictures, labels=[label for _, label in pictures], classes=tuple("abcd"))


@pytest.mark.parametrize(
    "name, model, settings",
    [
        ("mixa", "mixa_deit_tiny_p14", ["size=56"]),
        ("castling", "castling_deit_tiny_distilled", ["size=64"]),  # a head for the teacher
        ("castling", "castling_levit_128", []),  # BatchNorm and two heads
        ("qtvit", "qtvit_1", ["random_sizes=64,96", "bn_images=8", "mesa=1", "mesa_start=0"]),
        ("mobile", "mobile_pvt_v2_b0", ["size=64"]),
        ("mobile", "mobile_efficientformerv2_s0", []),
    ],
)
def test_recipes_train_their_own_models(name: str, model: str, settings: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    built = timm.create_model(model, num_classes=4)
    config = override(recipe(name, model), [*FEW, *settings])
    teacher = timm.create_model("resnet10t", num_classes=4) if config.needs_teacher else None
    images = eight()
    before = {key: value.clone() for key, value in built.state_dict().items()}
    sets, options = (images, images), {"loader": "streamed", "workers": 0}
    outcome = train(built, sets, config, teacher=teacher, output=tmp_path / "run", **options)
    assert outcome.steps == 2
    again: Any = linvit.load(tmp_path / "run" / "last").eval()
    side = config.size or max(config.random_sizes, default=224)
    picture = torch.randn(1, 3, side, side)
    assert torch.isfinite(again(picture)).all() and again(picture).shape == (1, 4)
    assert any(not torch.equal(value, before[key]) for key, value in again.state_dict().items())
    assert again.pretrained_cfg["label_names"] == tuple("abcd")


def test_hooks_do_not_pile_up() -> None:
    """A training takes its hooks with it, whatever the model had before."""
    student, teacher = small_model("stella"), small_model()
    pictures = [(picture.resize((8, 8)), label) for picture, label in eight().source]
    images = Images("eight", pictures, labels=[label for _, label in pictures], classes=tuple("abcd"))
    config = override(recipe("fast"), ["batch_size=4", "precision=fp32", "epochs=3", "stages.features.fit=4"])

    def hooks() -> int:
        every = (*student.modules(), *teacher.modules())
        return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in every)

    before = hooks()
    train(student, (images, None), config, teacher=teacher)
    assert hooks() == before


def test_another_teacher_may_not_go_on(tmp_path: Path) -> None:
    pictures = [(picture.resize((8, 8)), label) for picture, label in eight().source]
    images = Images("eight", pictures, labels=[label for _, label in pictures], classes=tuple("abcd"))
    config = override(recipe("distil"), ["batch_size=4", "precision=fp32", "epochs=2"])
    train(small_model("stella"), (images, None), config, teacher=small_model(), output=tmp_path)
    with pytest.raises(LinvitError, match="belongs to another run"):
        other = small_model(seed=1)
        train(small_model("stella"), (images, None), config, teacher=other, output=tmp_path, resume=True)
