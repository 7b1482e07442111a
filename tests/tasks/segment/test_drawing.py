"""A veil over each class, and a legend of those that are there."""

import numpy as np
import pytest
import torch

from linvit.errors import LinvitError
from linvit.figures.classes import class_colour
from linvit.tasks.segment.drawing import draw_segmentation

NAMES = ["sky", "sea", "boat", "land"]


def test_veils_and_legend() -> None:
    image = torch.full((3, 60, 90), 200, dtype=torch.uint8)
    labels = torch.zeros(60, 90, dtype=torch.long)
    labels[30:] = 2
    labels[:, 80:] = 255
    picture = np.asarray(draw_segmentation(image, labels, NAMES))
    for rows, label in ((slice(5, 25), 0), (slice(35, 55), 2)):
        wanted = 100 + 0.5 * np.array(class_colour(label))
        assert np.abs(picture[rows, 5:70].astype(float) - wanted).max() <= 2
    assert tuple(picture[29, 40]) == class_colour(0) and tuple(picture[30, 40]) == class_colour(2), "the edge is drawn"
    assert (picture[:60, 82:] == 200).all(), "what is not judged is as it was"
    legend = {tuple(pixel) for pixel in picture[60:].reshape(-1, 3)}
    assert {class_colour(0), class_colour(2), (255, 255, 255)} <= legend
    assert not {class_colour(1), class_colour(3)} & legend
    assert picture.shape[1] == 90


def test_a_legend_of_many_classes_takes_more_rows() -> None:
    labels = torch.arange(4)[:, None].expand(4, 60).repeat_interleave(10, 0)
    image = torch.zeros(3, 40, 60, dtype=torch.uint8)
    few, many = (draw_segmentation(image, labels.clamp(max=top), NAMES) for top in (0, 3))
    assert few.height < many.height and few.width == many.width == 60
    assert draw_segmentation(image, torch.full((40, 60), 255), NAMES).height == 40


def test_background_stays_bare() -> None:
    image = torch.full((3, 40, 60), 120, dtype=torch.uint8)
    labels = torch.zeros(40, 60, dtype=torch.long)
    labels[:, 30:] = 1
    picture = np.asarray(draw_segmentation(image, labels, ["background", "cat"]))
    assert (picture[:40, :30] == 120).all() and (picture[:40, 30:] != 120).any(2).all()
    assert class_colour(0) not in {tuple(pixel) for pixel in picture.reshape(-1, 3)}


def test_labels_of_another_size() -> None:
    with pytest.raises(LinvitError, match=r"labels of \(4, 4\) do not fit an image of \(8, 9\): resize one"):
        draw_segmentation(torch.zeros(3, 8, 9, dtype=torch.uint8), torch.zeros(4, 4, dtype=torch.long), NAMES)
