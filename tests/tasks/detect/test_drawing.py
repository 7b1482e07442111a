"""Boxes, names and masks where they belong, and nothing elsewhere."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from linvit.figures.classes import Chips, as_picture, class_colour, ink_on, text_size
from linvit.tasks.detect.drawing import chip_places, draw_detections, overlap

NAMES = ["cat", "a rather long name", "bird"]
GREY = 90


def grey(height: int, width: int) -> torch.Tensor:
    return torch.full((3, height, width), GREY, dtype=torch.uint8)


def found(boxes: list[list[float]], scores: list[float], labels: list[int], **more: Any) -> dict[str, torch.Tensor]:
    place = torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4)
    return {"boxes": place, "scores": torch.tensor(scores), "labels": torch.tensor(labels, dtype=torch.long), **more}


@pytest.mark.parametrize("scale", [1, 8])
def test_boxes_and_chips(scale: int) -> None:
    box = [60 * scale, 80 * scale, 200 * scale, 150 * scale]
    image = grey(180 * scale, 256 * scale)
    picture = np.asarray(draw_detections(image, found([box, [0, 0, 50, 50]], [0.9, 0.4], [2, 0]), NAMES))
    left, top, right, bottom = box
    for y, x in ((bottom - 1, left), (bottom - 1, right - 1), (top, right - 1)):
        assert tuple(picture[y, x]) == class_colour(2)
    assert (picture[top + 20 : bottom - 20, left + 20 : right - 20] == GREY).all(), "the inside is free"
    assert (picture[bottom:] == GREY).all() and (picture[: 60 * scale] == GREY).all(), "40 % is below the threshold"
    name = picture[top - Chips(text_size(as_picture(image))).height : top]
    painted = (name != GREY).any(2).any(0).nonzero()[0]
    assert painted.min() == left and painted.max() - left > 0.1 * (right - left)
    assert (image == GREY).all(), "the image itself is untouched"


def test_masks_are_a_veil() -> None:
    mask = torch.zeros(1, 60, 80, dtype=torch.bool)
    mask[0, 20:50, 30:] = True
    picture = np.asarray(
        draw_detections(
            Image.new("RGB", (80, 60), (GREY,) * 3), found([[30, 20, 80, 50]], [1.0], [1], masks=mask), NAMES
        )
    )
    wanted = 0.6 * GREY + 0.4 * np.array(class_colour(1))
    assert np.abs(picture[44, 50:60].astype(float) - wanted).max() <= 2
    assert (picture[52:] == GREY).all() and (picture[:, :28][22:] == GREY).all()


def test_names_stay_in_the_picture_and_apart() -> None:
    picture = Image.new("RGB", (256, 200))
    boxes = [[-5, -9, 60, 60], [0, 0, 62, 61], [1, 1, 63, 99], [230, 0, 270, 199], [200, 190, 256, 210]]
    places = chip_places(boxes, [70.0] * 5, 19, picture)
    rectangles = [(left, top, left + 70, top + 19) for left, top in places]
    assert all(min(r) >= 0 and r[2] <= 256 and r[3] <= 200 for r in rectangles)
    assert not any(overlap(*pair) for pair in itertools.combinations(rectangles, 2))
    drawn = draw_detections(picture, found(boxes, [0.9, 0.8, 0.7, 0.6, 0.5], [0, 1, 2, 0, 1]), NAMES)
    assert drawn.size == picture.size


def test_nothing_found() -> None:
    assert (np.asarray(draw_detections(grey(40, 50), found([], [], []), NAMES)) == GREY).all()


def test_colours() -> None:
    colours = np.array([class_colour(index) for index in range(150)], float)
    apart = np.abs(colours[:, None] - colours).max(2) + 255 * np.eye(150)
    assert apart[:21, :21].min() > 25 and apart.min() > 8
    assert class_colour(0) == (149, 29, 82) and class_colour(1) == (118, 142, 249), "they stay what they were"
    assert ink_on((255, 255, 120)) == "black" and ink_on((90, 20, 20)) == "white"
