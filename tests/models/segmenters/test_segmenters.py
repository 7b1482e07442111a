"""Every segmenter: what it gives, what it learns, and what it leaves out."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from linvit import LinvitError
from linvit.measurement.macs import count_macs
from linvit.models.dense import IGNORED
from linvit.models.segmenters.mask2former import Mask2Former
from linvit.models.segmenters.semantic_fpn import SemanticFPN
from linvit.models.segmenters.upernet import UPerNet
from tests.models.segmenters.pictures import CLASSES, Strided, ignored, shapes

Build = Callable[[], Any]


def semantic_fpn() -> nn.Module:
    return SemanticFPN(Strided(), CLASSES, channels=32, head_channels=32)


def upernet() -> nn.Module:
    return UPerNet(Strided(), CLASSES, channels=32, auxiliary_channels=16)


def mask2former() -> nn.Module:
    small = {"pixel_layers": 1, "layers": 3, "heads": 4, "pixel_feedforward": 64, "feedforward": 64, "points": 256}
    return Mask2Former(Strided(), CLASSES, channels=32, queries=8, **small)


SEGMENTERS = {"semantic_fpn": semantic_fpn, "upernet": upernet, "mask2former": mask2former}
every = pytest.mark.parametrize("build", SEGMENTERS.values(), ids=SEGMENTERS.keys())


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def total(losses: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(losses.values())).sum()


@every
def test_logits_have_the_size_of_the_image(build: Build) -> None:
    model = build().eval()
    with torch.no_grad():
        for height, width in ((64, 64), (65, 97), (33, 40)):
            assert model(torch.randn(2, 3, height, width)).shape == (2, CLASSES, height, width)


@every
def test_every_parameter_learns(build: Build) -> None:
    model = build().train()
    images, targets = shapes()
    losses = model(images, targets)
    assert all(loss.ndim == 0 and loss > 0 for loss in losses.values())
    total(losses).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    assert sum(bool(parameter.grad.any()) for parameter in model.parameters()) > 0.8 * len(list(model.parameters()))


@every
def test_padding_is_told_to_the_backbone_and_not_judged(build: Build) -> None:
    model = build().train()
    images, targets = shapes(2, 48, 56)
    padded = F.pad(images, (0, 8, 0, 16))
    explicit = [{**t, "labels": F.pad(t["labels"], (0, 8, 0, 16), value=IGNORED)} for t in targets]
    losses = []
    for given in (targets, explicit):
        torch.manual_seed(0)
        losses.append(total(copy.deepcopy(model)(padded, given)))
    torch.testing.assert_close(*losses)
    model.eval()(padded, targets)
    assert model.backbone.sizes.tolist() == [[48, 56], [48, 56]]


@every
def test_an_image_without_labels_costs_nothing(build: Build) -> None:
    model = build().train()
    images, targets = shapes()
    loss = total(model(images, [ignored(), ignored()]))
    loss.backward()
    assert loss == 0
    for name, parameter in model.named_parameters():  # which is what DistributedDataParallel waits for
        assert parameter.grad is not None and not parameter.grad.any(), name
    assert total(model(images, [targets[0], ignored()])) > 0


@every
def test_half_precision_learns_in_single(build: Build) -> None:
    model = build().train()
    images, targets = shapes()
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(images, targets)
    assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in losses.values())
    total(losses).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@every
def test_is_counted_without_data(build: Build) -> None:
    model = build()
    assert count_macs(model, (3, 64, 96)) > count_macs(model.backbone, (3, 64, 96)) > 0


@every
def test_parts_hold_every_parameter_once(build: Build) -> None:
    model = build()
    counted = [id(p) for part in model.parts().values() for module in part for p in module.parameters()]
    assert sorted(counted) == sorted(id(p) for p in model.parameters())
    assert next(iter(model.parts())) == "backbone" and model.task == "segment"


@every
def test_tables_are_not_decayed(build: Build) -> None:
    model = build()
    names = model.no_weight_decay()
    assert "backbone.trunk.0.0.0.bias" in names and names <= dict(model.named_parameters()).keys()
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    assert embeddings <= {id(model.get_parameter(name)) for name in names}


@every
def test_mistakes_are_one_line(build: Build) -> None:
    model, (images, targets) = build().train(), shapes()
    with pytest.raises(LinvitError, match="wants targets"):
        model(images)
    with pytest.raises(LinvitError, match="labels of 64×64 pixels for images of 64×32"):
        model(images[..., :32], targets)
