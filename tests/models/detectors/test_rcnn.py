"""Faster and Mask R-CNN: equal to torchvision's own, and at ease with padding, odd sizes and poor annotations."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torchvision.models.detection as theirs
from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.roi_heads import paste_masks_in_image

from linvit.errors import LinvitError
from linvit.models.dense import Target
from linvit.models.detectors.cascade import CascadeMaskRCNN
from linvit.models.detectors.rcnn import RCNN, FasterRCNN, MaskRCNN
from linvit.models.detectors.regions import Anchors, pasted, usable
from linvit.models.fpn import by_level
from tests.models.detectors.small import SmallBackbone, rectangles

KINDS: list[type[RCNN]] = [FasterRCNN, MaskRCNN, CascadeMaskRCNN]
LIGHT: dict[str, Any] = {
    "width": 32,
    "hidden": 64,
    "anchor_sizes": (8, 16, 32, 64, 128),
    "proposals": 64,
    "samples": 64,
}
every = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def light(kind: type[RCNN], **args: Any) -> RCNN:
    return kind(SmallBackbone(), 3, **{**LIGHT, **args})  # type: ignore[arg-type]


@torch.no_grad()
def seen(model: RCNN, images: Tensor, targets: list[Target] | None = None) -> list[Target]:
    return model.eval()(images, targets)  # type: ignore[no-any-return]


class Same(nn.Module):
    """In the place of torchvision's transform: the images as they are, of these sizes."""

    sizes: list[tuple[int, int]]

    def forward(self, images: Tensor, targets: Any) -> tuple[ImageList, Any]:
        return ImageList(images, self.sizes), targets

    def postprocess(self, found: list[Target], sizes: list[tuple[int, int]], _: Any) -> list[Target]:
        for each, size in zip(found, sizes, strict=False):  # nothing is found in training
            if "masks" in each:
                each["masks"] = paste_masks_in_image(each["masks"], each["boxes"], size)
        return found


class Maps(nn.Module):
    out_channels = 32

    def __init__(self, model: RCNN) -> None:
        super().__init__()
        self.backbone, self.neck = model.backbone, model.neck

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return self.neck(by_level(self.backbone(images)))


def torchvisions(model: RCNN, targets: Sequence[Target], **args: Any) -> Any:
    """torchvision's model around the same backbone and neck, with the weights of ours."""
    heads = {"box_head": TwoMLPHead(32 * 49, 64), "box_predictor": FastRCNNPredictor(64, 4)}
    if model.masks:
        heads |= {"mask_head": MaskRCNNHeads(32, (32,) * 4, 1), "mask_predictor": MaskRCNNPredictor(32, 32, 4)}
    kind = theirs.MaskRCNN if model.masks else theirs.FasterRCNN
    twin = kind(Maps(model), rpn_pre_nms_top_n_test=64, rpn_post_nms_top_n_test=64, **heads, **args)
    twin.transform = Same()
    twin.transform.sizes = [tuple(target["size"].tolist()) for target in targets]
    state = {key: value for key, value in model.state_dict().items() if key.startswith(("rpn.", "roi_heads."))}
    missing = twin.load_state_dict(state, strict=False)
    assert not missing.unexpected_keys and all(key.startswith("backbone.") for key in missing.missing_keys)
    return twin.train(model.training)


@pytest.mark.parametrize("kind", [FasterRCNN, MaskRCNN])
def test_losses_and_detections_are_torchvisions(kind: type[RCNN]) -> None:
    model = light(kind, anchor_sizes=(32, 64, 128, 256, 512), samples=512, score_threshold=0.2)
    images, targets = rectangles((128, 96), (64, 128))
    twin = torchvisions(model, targets, rpn_pre_nms_top_n_train=128, rpn_post_nms_top_n_train=128, box_score_thresh=0.2)
    shifted = [{**target, "labels": target["labels"] + 1} for target in targets]
    torch.manual_seed(1)
    ours = model(images, targets)
    torch.manual_seed(1)
    expected = twin(images, shifted)
    assert ours.keys() == expected.keys() and len(ours) == 4 + model.masks
    torch.testing.assert_close(ours, expected)
    grads, others = (
        torch.autograd.grad(sum(losses.values()), list(model.neck.parameters())) for losses in (ours, expected)
    )
    torch.testing.assert_close(grads, others)

    ours, known = seen(model, images, targets), twin.eval()(images)
    assert sum(len(found["boxes"]) for found in ours) > 10
    for found, other, target in zip(ours, known, targets, strict=True):
        torch.testing.assert_close(found["boxes"], other["boxes"])
        torch.testing.assert_close(found["scores"], other["scores"])
        assert torch.equal(found["labels"] + 1, other["labels"])
        if model.masks:
            assert found["masks"].dtype == torch.bool and found["masks"].shape[1:] == tuple(target["size"].tolist())
            assert torch.equal(found["masks"], other["masks"][:, 0] > 0.5)


@every
def test_losses_reach_every_weight_and_repeat(kind: type[RCNN]) -> None:
    model = light(kind)
    images, targets = rectangles((96, 96), (64, 80))

    def losses() -> dict[str, Tensor]:
        torch.manual_seed(3)
        return model(images, targets)  # type: ignore[no-any-return]

    first = losses()
    sum(first.values(), torch.zeros(())).backward()
    assert all(value.isfinite() and value.ndim == 0 for value in first.values())
    assert [name for name, weight in model.named_parameters() if weight.grad is None] == []
    torch.testing.assert_close(losses(), first, rtol=0, atol=0)


@every
def test_parts_are_the_whole(kind: type[RCNN]) -> None:
    model = light(kind)
    parts = model.parts()
    assert list(parts) == ["backbone", "neck", "head"]
    of_parts = [id(weight) for part in parts.values() for module in part for weight in module.parameters()]
    assert sorted(of_parts) == sorted(map(id, model.parameters()))


@every
def test_an_image_is_seen_the_same_in_any_company(kind: type[RCNN]) -> None:
    model = light(kind, score_threshold=0.25, detections=10).double().eval()
    images, targets = rectangles((70, 101), (128, 64))
    images = images.double()
    together = model(images, targets)
    for number, expected in enumerate(together):
        alone = model(images[number : number + 1], targets[number : number + 1])[0]
        assert len(expected["boxes"])
        torch.testing.assert_close(alone, expected)
        height, width = targets[number]["size"].tolist()
        assert (expected["boxes"] <= torch.tensor([width, height, width, height])).all()


def annotated(boxes: list[list[float]], masks: bool) -> Target:
    target = {"size": torch.tensor([64, 64]), "boxes": torch.tensor(boxes).reshape(-1, 4)}
    target["labels"] = torch.zeros(len(boxes), dtype=torch.int64)
    return {**target, "masks": torch.ones(len(boxes), 64, 64, dtype=torch.uint8)} if masks else target


POOR: dict[str, list[list[float]]] = {
    "none": [],
    "outside": [[-50.0, -50.0, -10.0, -10.0], [70.0, 70.0, 90.0, 90.0]],
    "without area": [[10.0, 10.0, 10.0, 30.0], [10.0, 10.0, 40.0, 10.0], [20.0, 20.0, 10.0, 10.0]],
    "no number": [[float("nan"), 0.0, 10.0, 10.0]],
    "partly outside": [[-20.0, -20.0, 30.0, 30.0], [40.0, 40.0, 1e6, float("inf")]],
}


@every
@pytest.mark.parametrize("boxes", POOR.values(), ids=POOR.keys())
def test_poor_annotations(kind: type[RCNN], boxes: list[list[float]]) -> None:
    model = light(kind)
    losses = model(torch.randn(1, 3, 64, 64), [annotated(boxes, model.masks)])
    total = sum(losses.values(), torch.zeros(()))
    total.backward()
    assert total.isfinite()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients.values())


def test_usable_clips_and_drops() -> None:
    target = annotated([box for boxes in POOR.values() for box in boxes], masks=True)
    found = usable({**target, "labels": torch.arange(8)}, (64, 50), torch.float32)
    assert found["boxes"].tolist() == [[0, 0, 30, 30], [40, 40, 50, 64]]
    assert found["labels"].tolist() == [7, 8] and found["masks"].shape == (2, 64, 64)


@every
def test_bfloat16_autocast(kind: type[RCNN]) -> None:
    model = light(kind, score_threshold=0.25)
    images, targets = rectangles((96, 96), (64, 80))
    torch.manual_seed(1)
    expected = model(images, targets)
    with torch.autocast("cpu", torch.bfloat16):
        torch.manual_seed(1)
        losses = model(images, targets)
        found = model.eval()(images, targets)
    assert all(value.dtype == torch.float32 for value in losses.values())
    for name, value in losses.items():
        torch.testing.assert_close(value, expected[name], rtol=0.2, atol=0.02, msg=name)
    for each in found:
        assert each["boxes"].dtype == each["scores"].dtype == torch.float32 and each["boxes"].isfinite().all()
    sum(losses.values(), torch.zeros(())).backward()


@every
def test_bfloat16_weights(kind: type[RCNN]) -> None:
    found = light(kind, score_threshold=0.25).bfloat16().eval()(torch.randn(1, 3, 64, 64).bfloat16())[0]
    assert len(found["boxes"]) and found["boxes"].dtype == torch.float32


@every
def test_nothing_found(kind: type[RCNN]) -> None:
    found = light(kind, score_threshold=0.99).eval()(torch.randn(2, 3, 64, 96))
    for each in found:
        assert each["boxes"].shape == (0, 4) and each["labels"].shape == each["scores"].shape == (0,)
        assert "masks" not in each or each["masks"].shape == (0, 64, 96)


@every
def test_weights_make_the_round_trip(kind: type[RCNN]) -> None:
    model = light(kind, score_threshold=0.25).eval()
    images, _ = rectangles((64, 64))
    again = light(kind, score_threshold=0.25).eval()
    again.load_state_dict(deepcopy(model.state_dict()))
    torch.testing.assert_close(again(images), model(images))


@every
def test_mistakes(kind: type[RCNN]) -> None:
    with pytest.raises(LinvitError, match="one for each stride"):
        light(kind, anchor_sizes=(32, 64))
    model = light(kind)
    with pytest.raises(LinvitError, match="wants targets"):
        model(torch.randn(1, 3, 64, 64))
    if model.masks:
        with pytest.raises(LinvitError, match="masks"):
            model(torch.randn(1, 3, 64, 64), [annotated([[0.0, 0.0, 9.0, 9.0]], masks=False)])


@pytest.mark.parametrize("side", [64, 101])
def test_anchors_stand_at_multiples_of_their_stride(side: int) -> None:
    anchors = Anchors((32, 64), (0.5, 1.0, 2.0), (4, 8))
    maps = [torch.zeros(1, 1, -(-side // stride), -(-side // stride), dtype=torch.bfloat16) for stride in (4, 8)]
    found = anchors(ImageList(torch.zeros(1, 3, side, side), [(side, side)]), maps)[0]
    centres, areas = (found[:, :2] + found[:, 2:]) / 2, (found[:, 2:] - found[:, :2]).prod(1)
    fine = 3 * maps[0].shape[-1] ** 2
    assert found.dtype == torch.float32 and len(found) == fine + 3 * maps[1].shape[-1] ** 2
    assert (centres[:fine] % 4 == 0).all() and (centres[fine:] % 8 == 0).all()
    assert centres[fine - 1].tolist() == [4 * (maps[0].shape[-1] - 1)] * 2
    assert areas[:3].tolist() == pytest.approx([32**2] * 3, rel=0.05)
    assert areas[-3:].tolist() == pytest.approx([64**2] * 3, rel=0.05)


def test_regions_are_pooled_at_the_strides_of_the_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where a batch is mostly padding, from which torchvision would infer other strides."""
    model: Any = light(FasterRCNN)
    places = torch.arange(0.0, 256.0, 4).expand(1, 1, 64, 64)
    maps = {str(level): nn.functional.avg_pool2d(places, 2**level) for level in range(4)}
    found = model.roi_heads.box_roi_pool(maps, [torch.tensor([[16.0, 16.0, 44.0, 44.0]])], [(60, 60)])
    assert found[0, 0, 0].tolist() == pytest.approx([18 + 4 * i for i in range(7)])


@pytest.mark.parametrize("count", [0, 1, 40])
def test_pasting_in_turns_is_pasting_at_once(count: int) -> None:
    masks, corners = torch.rand(count, 1, 28, 28), 40 * torch.rand(count, 2)
    boxes = torch.cat((corners, corners + 5 + 20 * torch.rand(count, 2)), 1)
    whole: Callable[..., Tensor] = paste_masks_in_image
    assert torch.equal(pasted(masks, boxes, (60, 70)), whole(masks, boxes, (60, 70))[:, 0] > 0.5)
