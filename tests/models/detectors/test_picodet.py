"""PicoDet on a stand-in backbone: counts, losses, learning, padding, precision, odd targets."""

import math

import pytest
import torch
from torch import Tensor
from torchvision.ops import box_iou, generalized_box_iou

from linvit.errors import LinvitError
from linvit.models.dense import DenseModel, Target
from linvit.models.detectors.picodet import BINS, STRIDES, Cells, PicoDet, losses
from linvit.models.detectors.simota import assign
from tests.models.detectors.standin import StandIn

COLOURS = torch.tensor([[2.0, 0, 0], [0, 2, 0], [0, 0, 2]])


def scene(boxes: list[list[int]], labels: list[int], size: tuple[int, int] = (64, 80)) -> tuple[Tensor, Target]:
    """Rectangles, each of its class's colour."""
    image = torch.full((3, *size), -1.0)
    for (left, top, right, bottom), label in zip(boxes, labels, strict=True):
        image[:, top:bottom, left:right] = COLOURS[label][:, None, None]
    place = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return image, {"size": torch.tensor(size), "boxes": place, "labels": torch.tensor(labels, dtype=torch.long)}


def scenes() -> tuple[Tensor, list[Target]]:
    """Two images with two objects, and one that is empty."""
    some = [
        scene([[4, 6, 40, 40], [44, 20, 78, 60]], [0, 1]),
        scene([[6, 30, 34, 60], [40, 4, 72, 30]], [2, 0]),
        scene([], []),
    ]
    return torch.stack([image for image, _ in some]), [target for _, target in some]


def lively(num_classes: int = 3) -> PicoDet:
    """As if trained a little: norms that know their inputs, and scores and boxes that differ from cell to cell."""
    torch.manual_seed(0)
    model = PicoDet(StandIn(), num_classes, size="s")
    for out in model.head.out:
        torch.nn.init.normal_(out.weight, std=0.2)
        torch.nn.init.zeros_(out.bias)
    images, targets = scenes()
    with torch.no_grad():
        for _ in range(20):
            model(images + torch.randn_like(images), targets)
    return model.eval()


def normed(inputs: int, outputs: int, kernel: int = 1, groups: int = 1) -> int:
    """Parameters of a convolution and its batch norm."""
    return inputs // groups * outputs * kernel**2 + 2 * outputs


def squeezed(width: int) -> int:
    return width * (width // 4) * 2 + width // 4 + width


def rounded(width: float, step: int) -> int:
    near = max(step, int(width + step / 2) // step * step)
    return near + step if near < 0.9 * width else near


def esnet(scale: float, ratios: list[float]) -> tuple[int, tuple[int, ...]]:
    """Parameters and widths of PicoDet's own backbone."""
    widths = [24, *(rounded(width * scale, 16) for width in (128, 256, 512))]
    total, ratio = normed(3, 24, 3), iter(ratios)
    for inputs, outputs, repeats in zip(widths, widths[1:], (3, 7, 3), strict=False):
        for block in range(repeats):
            middle = rounded(int(outputs * next(ratio)), 8)
            half = middle // 2
            if block:
                total += normed(outputs // 2, half) + squeezed(middle) + normed(middle, outputs // 2)
            else:
                total += normed(inputs, inputs, 3, inputs) + normed(inputs, outputs // 2) + normed(inputs, half)
                total += squeezed(half) + normed(half, outputs // 2)
                total += normed(outputs, outputs, 3, outputs) + normed(outputs, outputs)
            total += normed(half, half, 3, half)
    return total, tuple(widths[1:])


LARGER = [0.875, 0.5, 1, 0.625, 0.5, 0.75, 0.625, 0.625, 0.5, 0.625, 1, 0.625, 0.75]
SMALL = [0.875, 0.5, 0.5, 0.5, 0.625, 0.5, 0.625, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5]


@pytest.mark.parametrize(
    ("size", "scale", "ratios", "published"),
    [("s", 0.75, SMALL, 0.99), ("m", 1.0, LARGER, 2.15), ("l", 1.25, LARGER, 3.30)],
)
def test_parameters_are_those_published(size: str, scale: float, ratios: list[float], published: float) -> None:
    """Neck and head for 80 classes, with what ESNet has, make the printed millions."""
    own, widths = esnet(scale, ratios)
    model = PicoDet(StandIn((8, *widths)), 80, size=size)
    parts = model.parts()
    assert list(parts) == ["backbone", "neck", "head"] and parts["backbone"] == [model.backbone]
    counted = own + sum(p.numel() for part in ("neck", "head") for module in parts[part] for p in module.parameters())
    assert math.floor(counted / 1e4) / 100 == published
    assert sum(p.numel() for p in model.parameters()) == counted - own + sum(
        p.numel() for p in model.backbone.parameters()
    )


def test_losses_cell_by_cell() -> None:
    generator = torch.Generator().manual_seed(1)
    grids = [(4, 5), (2, 3), (1, 2), (1, 1)]
    count = sum(height * width for height, width in grids)
    logits = torch.randn(2, count, 3, generator=generator, dtype=torch.float64) - 1
    distances = torch.randn(2, count, 4, BINS, generator=generator, dtype=torch.float64)
    sizes = torch.tensor([[32, 40], [24, 33]])
    padding = []
    for stride, (height, width) in zip(STRIDES, grids, strict=True):
        hidden = [[[y * stride >= h or x * stride >= w for x in range(width)] for y in range(height)] for h, w in sizes]
        padding.append(torch.tensor(hidden)[:, None])
    cells = Cells(grids, padding, logits)
    assert cells.centres[:2].tolist() == [[4, 4], [12, 4]] and cells.centres[-1].tolist() == [32, 32]
    boxes = cells.boxes(distances)
    truths = [torch.tensor([[2.0, 3, 20, 25], [15, 5, 38, 30]]), torch.tensor([[10.0, 4, 90, 22]])]
    labels = [torch.tensor([0, 2]), torch.tensor([1])]
    targets = [{"size": s, "boxes": t, "labels": c} for s, t, c in zip(sizes, truths, labels, strict=True)]
    found = losses(logits, distances, boxes, cells, targets)

    clipped = [truths[0].double(), torch.tensor([[10.0, 4, 33, 22]], dtype=torch.float64)]
    score = box = distance = weights = positives = 0.0
    for i in range(2):
        usable = ~torch.cat([each[i].flatten() for each in padding])
        matched = assign(logits[i], boxes[i], cells.centres, cells.strides, clipped[i], labels[i], usable)
        positives += int((matched >= 0).sum())
        for cell in range(count):
            quality, g = [0.0, 0.0, 0.0], int(matched[cell])
            if g >= 0:
                truth = clipped[i][g]
                quality[int(labels[i][g])] = float(box_iou(boxes[i, cell][None], truth[None]))
                sure = float(logits[i, cell].sigmoid().max())
                weights += sure
                box += sure * (1 - float(generalized_box_iou(boxes[i, cell][None], truth[None])))
                (x, y), stride = cells.centres[cell].tolist(), float(cells.strides[cell])
                for side, far in enumerate([x - truth[0], y - truth[1], truth[2] - x, truth[3] - y]):
                    bins = min(max(float(far) / stride, 0), BINS - 1.1)
                    logs = distances[i, cell, side].log_softmax(0).tolist()
                    low = int(bins)
                    distance -= sure / 4 * ((low + 1 - bins) * logs[low] + (bins - low) * logs[low + 1])
            for s, q in zip(logits[i, cell].sigmoid().tolist(), quality, strict=True):
                entropy = -q * math.log(s) - (1 - q) * math.log(1 - s)
                score += float(usable[cell]) * entropy * (q if q > 0 else 0.75 * s**2)
    assert positives > 3 and weights > 1
    wanted = {"score": score / positives, "box": 2 * box / weights, "distance": 0.25 * distance / weights}
    assert {name: float(value) for name, value in found.items()} == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("size", [(64, 96), (61, 75), (33, 130)])
def test_padding_changes_nothing(size: tuple[int, int]) -> None:
    model = lively()
    image = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(2))
    other = torch.randn(1, 3, 96, 150, generator=torch.Generator().manual_seed(3))
    batch = torch.cat((torch.nn.functional.pad(image, (0, 150 - size[1], 0, 96 - size[0])), other))
    with torch.no_grad():
        (alone,) = model(image)
        padded, _ = model(batch, [{"size": torch.tensor(size)}, {"size": torch.tensor([96, 150])}])
    assert len(alone["boxes"]) > 20
    for name in ("boxes", "scores", "labels"):
        torch.testing.assert_close(padded[name], alone[name], rtol=1e-4, atol=1e-4)
    height, width = size
    left, top, right, bottom = alone["boxes"].unbind(1)
    assert min(left.min(), top.min()) >= 0 and right.max() <= width and bottom.max() <= height
    assert (right > left).all() and (bottom > top).all()


def test_half_precision_is_for_maps_only() -> None:
    model = lively()
    images, targets = scenes()
    with torch.no_grad():
        exact = model(images)
        with torch.autocast("cpu", torch.bfloat16):
            found = model(images)
    assert all(value.dtype == torch.float32 for one in found for value in (one["boxes"], one["scores"]))
    for one, other in zip(found, exact, strict=True):  # the surest are the same, up to what bfloat16 keeps
        assert (box_iou(one["boxes"][:5], other["boxes"]).amax(1) > 0.8).all()
    model.train()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(images, targets)
    assert all(value.dtype == torch.float32 and value.isfinite() for value in loss.values())
    sum(loss.values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_odd_targets() -> None:
    """None at all, boxes that reach out of the image or lie outside, without area, hundreds of them."""
    torch.manual_seed(0)
    model = PicoDet(StandIn(), 3, size="s")
    images, (usual, *_) = scenes()
    images = images[:2]
    none = {"size": usual["size"], "boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}
    loss = model(images, [none, none])
    sum(loss.values()).backward()
    first = {name: value.item() for name, value in loss.items()}
    assert first["box"] == first["distance"] == 0 and 0 < first["score"] < math.inf
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters()), "no parameter is unused"

    def of(*boxes: list[float]) -> Target:
        place = torch.tensor(boxes, dtype=torch.float32)
        return none | {"boxes": place, "labels": torch.zeros(len(boxes), dtype=torch.long)}

    def losses_of(target: Target) -> dict[str, float]:
        return {name: value.item() for name, value in model(images, [target, none]).items()}

    outside = losses_of(of([200, 200, 300, 300], [-50, 5, -20, 40], [10, 10, 10, 40]))
    assert outside == pytest.approx(first, abs=1e-6)
    cut = losses_of(of([-30, 8, 50, 400]))
    assert cut == pytest.approx(losses_of(of([0, 8, 50, 64])), abs=1e-6) and cut["box"] > 0
    corner = torch.rand(300, 2) * 50
    crowd = torch.cat((corner, corner + 2 + torch.rand(300, 2) * 20), dim=1).tolist()
    assert all(math.isfinite(value) for value in losses_of(of(*crowd)).values())


class WithBranch(StandIn):
    """The first map has a layer of its own, as that of a simple pyramid."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = torch.nn.Conv2d(8, 8, 1)

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> list[Tensor]:
        first, *others = super().forward(images, sizes)
        return [self.branch(first), *others]


def test_every_parameter_has_a_gradient() -> None:
    """As DistributedDataParallel demands, also what makes the map at stride 4 that PicoDet has no use for."""
    model = PicoDet(WithBranch(), 3, size="s")
    sum(model(*scenes()).values()).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert not model.backbone.branch.weight.grad.any() and model.backbone.trunk[0].weight.grad.any()


def test_objects_are_counted_over_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the other process has three times as many, a loss is divided by twice as much."""
    model, (images, targets) = lively().train(), scenes()
    alone = model(images, targets)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda count: count.mul_(4))
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    for name, loss in model(images, targets).items():
        torch.testing.assert_close(2 * loss, alone[name], msg=name)


def test_what_it_is_and_mistakes() -> None:
    model = PicoDet(StandIn(), 3)
    assert isinstance(model, DenseModel) and model.task == "detect" and not model.masks and model.num_classes == 3
    first = model(*scenes())
    assert set(first) == {"score", "box", "distance"}
    with torch.no_grad():
        assert float(model.eval()(scenes()[0])[0]["scores"].numel()) == 0, "at the start all scores are near 0.01"
    with pytest.raises(LinvitError, match="learns from targets: give them, or call eval"):
        model.train()(scenes()[0])
    with pytest.raises(LinvitError, match="unknown size of PicoDet 'x'; known: l, m, s"):
        PicoDet(StandIn(), 3, size="x")
