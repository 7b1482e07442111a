"""UPerNet against transformers' whole model, and its published size."""

import sys

import pytest
import torch
from torch import nn

from linvit import LinvitError
from linvit.models import dense
from linvit.models.segmenters.upernet import UPerNet
from tests.models.segmenters.pictures import CLASSES, Strided, shapes

transformers = pytest.importorskip("transformers")


class Encoder(nn.Module):
    """transformers' backbone in the place of ours."""

    strides = (4, 8, 16, 32)

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.channels = tuple(trunk.channels)

    def forward(self, images: torch.Tensor, sizes: torch.Tensor | None = None) -> list[torch.Tensor]:
        return list(self.trunk(images).feature_maps)


def test_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    stages = ["stage1", "stage2", "stage3", "stage4"]
    trunk = transformers.ConvNextConfig(hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1], out_features=stages)
    sizes = {"hidden_size": 16, "auxiliary_channels": 8, "num_labels": CLASSES}
    config = transformers.UperNetConfig(backbone_config=trunk, **sizes)
    theirs = transformers.UperNetForSemanticSegmentation(config)
    ours = UPerNet(Encoder(theirs.backbone), CLASSES, channels=16, auxiliary_channels=8, dropout=0.0)
    ours.head.load_state_dict(theirs.decode_head.state_dict())
    ours.auxiliary.load_state_dict(theirs.auxiliary_head.state_dict())
    images, targets = shapes()
    with torch.no_grad():
        torch.testing.assert_close(ours.eval()(images), theirs.eval()(images).logits)
    losses = ours.train()(images, targets)
    expected = theirs.train()(images, labels=torch.stack([target["labels"] for target in targets])).loss
    torch.testing.assert_close(losses["segmentation"] + losses["auxiliary"], expected)


def test_drops_whole_channels_before_it_classifies() -> None:
    torch.manual_seed(0)
    model = UPerNet(Strided(), CLASSES, channels=64, dropout=0.5).train()
    seen: list[torch.Tensor] = []
    for head in (model.head, model.auxiliary):
        head.classifier.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(*shapes())
    assert len(seen) == 2
    for before in seen:
        dropped = (before == 0).flatten(2).all(-1).float().mean()
        assert 0.35 < dropped < 0.65


def test_parameters_are_those_published() -> None:
    """60 M with Swin-T, as its paper has it, and 66.5 M with ResNet-50, as mmsegmentation's table has it."""
    for channels, trunk, published in (
        ((96, 192, 384, 768), 27_520_890, 59.94),
        ((256, 512, 1024, 2048), 23_508_032, 66.50),
    ):
        with torch.device("meta"):
            model = UPerNet(Strided(channels), 150)
        own = sum(p.numel() for module in model.parts()["head"] for p in module.parameters())
        assert round((trunk + own) / 1e6, 2) == published


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    images, targets = shapes(1)
    with pytest.raises(LinvitError, match="2 images or more"):
        UPerNet(Strided(), CLASSES, channels=16).train()(images, targets)
    monkeypatch.setattr("linvit.models.backbones.make_backbone", None, raising=False)
    for name in ("upernet", "mask2former"):
        monkeypatch.delitem(sys.modules, f"linvit.models.segmenters.{name}", raising=False)
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(LinvitError, match=rf"{name} comes from transformers: pip install linvit\[transformers\]"):
            dense.build(name, backbone="resnet18")
