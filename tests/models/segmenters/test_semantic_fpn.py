"""SemanticFPN against mmsegmentation's formula, its published size and a loss worked out by hand."""

import torch
from torch import Tensor
from torch.nn import functional as F

from linvit.models.dense import IGNORED
from linvit.models.segmenters.base import pixel_loss
from linvit.models.segmenters.semantic_fpn import SemanticFPN, SemanticHead
from tests.models.segmenters.pictures import Strided


def test_parameters_are_those_published_with_resnet_50() -> None:
    """28.5 M on ADE20K, as PVT's table has it: ResNet-50 without its classifier is 23.508 M."""
    model = SemanticFPN(Strided((256, 512, 1024, 2048)), 150)
    own = sum(p.numel() for part in ("neck", "head") for m in model.parts()[part] for p in m.parameters())
    assert own == 4_987_542 and round((23_508_032 + own) / 1e6, 1) == 28.5


def doubled(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


def test_head_is_that_of_panoptic_fpn() -> None:
    torch.manual_seed(0)
    head = SemanticHead(4, 8, 6, 3, 0.1).eval()
    maps = [torch.randn(2, 8, side, side) for side in (16, 8, 4, 2)]
    convolutions = [list(level) for level in head.levels]
    assert [len(level) for level in convolutions] == [1, 1, 2, 3]
    expected = convolutions[0][0](maps[0])
    for picture, level in zip(maps[1:], convolutions[1:], strict=True):
        for convolution in level:
            picture = doubled(convolution(picture))
        expected = expected + picture
    torch.testing.assert_close(head(maps), head.classifier(expected))


def test_loss_is_the_mean_over_judged_pixels() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 4, 6, requires_grad=True)
    labels = torch.randint(3, (2, 4, 6))
    labels[0, :2] = IGNORED
    expected = [-logits[b, :, y, x].log_softmax(0)[labels[b, y, x]] for b, y, x in (labels != IGNORED).nonzero()]
    loss = pixel_loss(logits, labels)
    torch.testing.assert_close(loss, torch.stack(expected).mean())
    loss.backward()
    assert logits.grad is not None and not logits.grad[0, :, :2].any() and logits.grad[0, :, 2:].all()
