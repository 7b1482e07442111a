"""Boxes, masks and labels stay in step with their image, and predictions find their way back."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as V

from linvit.errors import LinvitError
from linvit.tasks.dense.colours import vary
from linvit.tasks.dense.loading import batch_of
from linvit.tasks.dense.samples import Sample
from linvit.tasks.dense.transforms import (
    EvalTransform,
    TrainTransform,
    TransformSettings,
    draw_colours,
    label_map,
    to_original,
)

sides = st.integers(20, 90)
jitters = st.sampled_from([None, (0.5, 2.0), (0.1, 2.0)])
every_setting = st.builds(
    TransformSettings,
    size=st.integers(24, 80),
    resize=st.sampled_from(["square", "longest", "shortest"]),
    longest=st.sampled_from([None, 60]),
    sizes=st.sampled_from([(), (24, 40)]),
    scale_jitter=jitters,
    flip=st.sampled_from([0.0, 0.5, 1.0]),
    photometric=st.booleans(),
)


def rectangles(height: int, width: int, seed: int, count: int = 4) -> Sample:
    """An image with rectangles on it, each with its box, its mask, and a colour of its own."""
    draw = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (3, height, width), generator=draw, dtype=torch.uint8)
    left, top = (torch.randint(0, side - 8, (count,), generator=draw) for side in (width, height))
    right, bottom = (
        start + 4 + (torch.rand(count, generator=draw) * (side - start - 4)).long()
        for start, side in ((left, width), (top, height))
    )
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    for place in range(count):
        masks[place, top[place] : bottom[place], left[place] : right[place]] = 1
    boxes = torch.stack([left, top, right, bottom], dim=1).float()
    none = torch.zeros(count, dtype=torch.bool)
    return Sample(image, 7, torch.arange(count), boxes, none, none, (boxes[:, 2:] - boxes[:, :2]).prod(1), masks)


def box_of(mask: Tensor) -> list[int]:
    rows, columns = mask.any(1).nonzero()[:, 0], mask.any(0).nonzero()[:, 0]
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]


@settings(max_examples=150, deadline=None)
@given(every_setting, sides, sides, st.integers(0, 10**6))
def test_boxes_are_in_step_with_masks(chosen: TransformSettings, height: int, width: int, seed: int) -> None:
    sample = rectangles(height, width, seed)
    torch.manual_seed(seed)
    image, target = TrainTransform(chosen)(sample)
    assert image.dtype == torch.uint8 and target["size"].tolist() == list(image.shape[-2:])
    assert target["masks"].shape == (len(target["boxes"]), *image.shape[-2:])
    assert len(target["labels"]) == len(target["boxes"])
    if chosen.scale_jitter:
        assert max(image.shape[-2:]) <= chosen.size
    for box, mask in zip(target["boxes"], target["masks"], strict=True):
        assert (box - torch.tensor(box_of(mask))).abs().max() <= 1
        assert box.min() >= 0 and box[2] <= image.shape[-1] and box[3] <= image.shape[-2]


@settings(max_examples=40, deadline=None)
@given(every_setting, sides, sides, st.integers(0, 10**6))
def test_labels_are_in_step_with_masks(chosen: TransformSettings, height: int, width: int, seed: int) -> None:
    """A segmenter's labels, drawn with the same numbers, are where a detector's masks are."""
    sample = rectangles(height, width, seed, count=1)
    torch.manual_seed(seed)
    _, objects = TrainTransform(chosen)(sample)
    torch.manual_seed(seed)
    labels = torch.where(sample.masks[0].bool(), 3, 255)
    _, pixels = TrainTransform(chosen)(Sample(sample.image, 7, labels))
    assert pixels["labels"].dtype == torch.int64
    if len(objects["masks"]):
        assert torch.equal(pixels["labels"] == 3, objects["masks"][0].bool())
        assert set(pixels["labels"].unique().tolist()) <= {3, 255}


@pytest.mark.parametrize(
    ("resize", "longest", "size", "wanted"),
    [
        ("square", None, 448, (448, 448)),
        ("longest", None, 512, (384, 512)),
        ("shortest", None, 800, (800, 1067)),
        ("shortest", 1000, 800, (750, 1000)),
    ],
)
def test_sizes(resize: str, longest: int | None, size: int, wanted: tuple[int, int]) -> None:
    assert TransformSettings(size, resize, longest).resized(480, 640, size) == wanted


def test_hand_worked() -> None:
    """Twice as large and mirrored; of a crowd nothing is learnt."""
    sample = rectangles(20, 30, 0)
    sample.boxes[0] = torch.tensor([2.0, 3.0, 12.0, 8.0])
    sample.iscrowd[1] = True
    image, target = TrainTransform(TransformSettings(60, "longest", flip=1.0))(sample)
    assert image.shape == (3, 40, 60) and target["boxes"][0].tolist() == [36, 6, 56, 16]
    assert target["labels"].tolist() == [0, 2, 3]


def test_what_is_cut_off_is_not_learnt() -> None:
    sample = rectangles(40, 40, 0)
    sample.boxes[:] = torch.tensor([0.0, 0.0, 40.0, 10.0])
    sample.masks[:] = 0
    sample.masks[:, :10] = 1
    chosen = TransformSettings(20, "square", scale_jitter=(2.0, 2.0), flip=0.0)
    tops = []
    for seed in range(30):  # the upper quarter of the image, of which a half is cut at random: at most half of a box
        torch.manual_seed(seed)
        _, target = TrainTransform(chosen)(sample)
        tops.append(len(target["boxes"]))
        if len(target["boxes"]):
            assert target["boxes"][0, [0, 1, 2]].tolist() == [0, 0, 20] and 1 <= target["boxes"][0, 3] <= 10
    assert {*tops} == {0, 4}


def test_colours_are_drawn_where_asked() -> None:
    sample = rectangles(30, 30, 0)
    plain = TransformSettings(30, flip=0.0)
    assert "colours" not in TrainTransform(plain)(sample)[1]
    torch.manual_seed(1)
    found = TrainTransform(replace(plain, photometric=True))(sample)
    assert torch.equal(found[0], sample.image) and torch.equal(found[1]["boxes"], sample.boxes)
    drawn = torch.stack([draw_colours() for _ in range(2000)])
    changed = drawn != torch.tensor([1.0, 1, 1, 0, 1])
    share = changed.float().mean(0)
    assert not (changed[:, 1] & changed[:, 4]).any()  # contrast varies before or after, not both
    assert ((share - torch.tensor([0.5, 0.25, 0.5, 0.5, 0.25])).abs() < 0.05).all()


def test_colours_vary_as_torchvision_varies_them() -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (40, 3, 8, 9), dtype=torch.uint8)
    images[:, :, 5:] = 0  # padding, which must not make an image darker to contrast
    inside = torch.zeros(40, 8, 9, dtype=torch.bool)
    inside[:, :5] = True
    colours = torch.stack([draw_colours() for _ in images])
    found = vary(images, colours, inside)
    for image, row, mine in zip(images, colours.tolist(), found, strict=True):
        wanted = image[:, :5].float() / 255
        steps = (V.adjust_brightness, V.adjust_contrast, V.adjust_saturation, V.adjust_hue, V.adjust_contrast)
        for step, value in zip(steps, row, strict=True):
            wanted = step(wanted, value)
        assert (mine[:, :5] - 255 * wanted).abs().max() < 1.5


@settings(max_examples=60, deadline=None)
@given(every_setting, sides, sides, st.integers(0, 10**6))
def test_predictions_come_back_to_the_original(chosen: TransformSettings, height: int, width: int, seed: int) -> None:
    """What the truth looks like to the model, in a padded batch, is the truth again in original pixels."""
    sample = rectangles(height, width, seed)
    image, target = EvalTransform(chosen)(sample)
    assert torch.equal(target["boxes"], sample.boxes) and target["original"].tolist() == [height, width]
    down, across = image.shape[-2] / height, image.shape[-1] / width
    seen = sample.boxes * torch.tensor([across, down, across, down])
    padded = F.pad(F.interpolate(sample.masks[None].float(), image.shape[-2:], mode="nearest-exact")[0], (0, 7, 0, 5))
    found = to_original({"boxes": seen, "labels": sample.labels, "masks": padded[:, None]}, target)
    torch.testing.assert_close(found["boxes"], sample.boxes, atol=1e-3, rtol=0)
    assert found["masks"].shape == (4, 1, height, width) and found["labels"] is sample.labels
    if min(image.shape[-2:]) > max(height, width):  # nothing was lost on the way
        for box, mask in zip(sample.boxes, found["masks"][:, 0] > 0.5, strict=True):
            assert (box - torch.tensor(box_of(mask))).abs().max() <= 1
        again = to_original(padded.bool(), target)
        assert again.dtype == torch.bool and (again != sample.masks.bool()).float().mean() < 0.2


def test_logits_come_back_without_their_padding() -> None:
    """A ramp stays the ramp that it is at the original's size, whatever lies in the padding."""
    _, target = EvalTransform(TransformSettings(64, "longest"))(rectangles(32, 48, 0))
    assert target["size"].tolist() == [43, 64]
    ramp = (torch.arange(64) + 0.5).div(64).expand(2, 43, 64)
    padded = F.pad(ramp, (0, 0, 0, 21), value=1e4)
    found = to_original(padded, target)
    assert found.shape == (2, 32, 48)
    wanted = (torch.arange(48) + 0.5).div(48).expand(2, 32, 48)
    torch.testing.assert_close(found[..., 1:-1], wanted[..., 1:-1], atol=1e-5, rtol=0)
    nothing = to_original({"boxes": torch.zeros(0, 4), "masks": torch.zeros(0, 1, 64, 64)}, target)
    assert nothing["boxes"].shape == (0, 4) and nothing["masks"].shape == (0, 1, 32, 48)


def test_labels_come_back_a_few_classes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As all logits at the original's size would choose them; where one is not finite nothing is chosen."""
    _, target = EvalTransform(TransformSettings(40, "longest"))(rectangles(32, 48, 0))
    torch.manual_seed(0)
    logits = F.pad(torch.randn(7, 27, 40).half(), (0, 3, 0, 13), value=1e4)
    wanted = to_original(logits.float(), target).argmax(0)
    assert torch.equal(label_map(logits, target), wanted) and len(wanted.unique()) == 7
    masks = logits > 0
    together = to_original({"boxes": torch.zeros(7, 4), "masks": masks}, target)["masks"]
    monkeypatch.setattr("linvit.tasks.dense.transforms.AT_ONCE", 2 * 32 * 48)
    assert torch.equal(label_map(logits, target), wanted)
    assert torch.equal(to_original({"boxes": torch.zeros(7, 4), "masks": masks}, target)["masks"], together)
    assert together.dtype == torch.bool
    for place, odd in enumerate((torch.nan, torch.inf, -torch.inf)):
        logits[3 * place, 0, 0] = odd
        found = label_map(logits, target)
        assert found[0, 0] == -1 and torch.equal(found[2:], wanted[2:])


def test_pictures_alone_become_a_batch() -> None:
    pictures = [torch.full((3, 20, 30), 255, dtype=torch.uint8), torch.zeros(3, 30, 20, dtype=torch.uint8)]
    images, targets = batch_of(pictures, TransformSettings(40, "shortest", mean=(0.5,) * 3, std=(0.25,) * 3))
    assert images.shape == (2, 3, 64, 64)  # 40×60 and 60×40, on a canvas of both and a multiple of 32
    assert (images[0, :, :40, :60] == 2).all() and (images[1, :, :60, :40] == -2).all()
    assert not images[0, :, 40:].any() and not images[1, :, :, 40:].any()
    assert [target["size"].tolist() for target in targets] == [[40, 60], [60, 40]]


def test_settings_that_mean_nothing() -> None:
    for arguments, message in (
        ({"resize": "stretch"}, "unknown resize 'stretch'"),
        ({"size": 0}, "an image cannot have 0 pixels"),
        ({"scale_jitter": (2.0, 0.5)}, r"scale_jitter \(2.0, 0.5\) is no range"),
    ):
        with pytest.raises(LinvitError, match=message):
            TransformSettings(**arguments)
