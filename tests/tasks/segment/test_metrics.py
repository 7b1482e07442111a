"""mIoU, mAcc and pAcc against numpy and by hand."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linvit import LinvitError
from linvit.tasks.segment.metrics import SegmentationMeter

NAMES = ("sky", "road", "tree", "boat")


def by_hand(chosen: np.ndarray, truth: np.ndarray, classes: int) -> dict[str, float]:
    """One class after the other, as sets of pixels."""
    judged = truth != 255
    ious, accuracies = [], []
    for label in range(classes):
        true, given_it = judged & (truth == label), judged & (chosen == label)
        both, either = (true & given_it).sum(), (true | given_it).sum()
        if either:
            ious.append(both / either)
        if true.any():
            accuracies.append(both / true.sum())
    right = (judged & (chosen == truth)).sum() / judged.sum()
    return {"mIoU": float(np.mean(ious)), "mAcc": float(np.mean(accuracies)), "pAcc": float(right)}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), images=st.integers(1, 4), used=st.integers(1, 4), share=st.floats(0, 0.9))
def test_agrees_with_numpy(seed: int, images: int, used: int, share: float) -> None:
    random = np.random.default_rng(seed)
    chosen, truth = (random.integers(used, size=(images, 5, 7)) for _ in range(2))
    truth[random.random(truth.shape) < share] = 255
    truth[0, 0, 0] = 0
    meter = SegmentationMeter(NAMES)
    meter.add(torch.from_numpy(chosen), torch.from_numpy(truth))
    assert meter.compute().metrics() == pytest.approx(by_hand(chosen, truth, len(NAMES)))


def test_worked_out_by_hand() -> None:
    truth = torch.tensor([[[0, 0, 0, 1], [1, 1, 255, 255]]])
    chosen = torch.tensor([[[0, 0, 1, 1], [1, 2, 2, 3]]])
    meter = SegmentationMeter(NAMES)
    meter.add(chosen, truth)
    found = meter.compute()
    assert found.per_class == pytest.approx({"sky": 2 / 3, "road": 2 / 4, "tree": 0})  # nobody has or gets a boat
    assert found.metrics() == pytest.approx({"mIoU": (2 / 3 + 1 / 2) / 3, "mAcc": 2 / 3, "pAcc": 4 / 6})
    assert found.broken == 0


def test_several_processes_are_one() -> None:
    torch.manual_seed(0)
    chosen, truth = torch.randint(4, (4, 3, 5)), torch.randint(4, (4, 3, 5))
    whole, merged = SegmentationMeter(NAMES), SegmentationMeter(NAMES)
    whole.add(chosen, truth)
    for process in range(2):
        part = SegmentationMeter(NAMES)
        part.add(chosen[process::2], truth[process::2])
        merged.merge(part.state())
    assert merged.compute().metrics() == whole.compute().metrics()
    np.testing.assert_array_equal(merged.state(), whole.state())


def test_where_nothing_is_chosen_is_wrong() -> None:
    meter = SegmentationMeter(NAMES)
    meter.add([torch.tensor([[-1, 1], [1, 1]])], [torch.ones(2, 2, dtype=torch.uint8)])
    found = meter.compute()
    assert found.broken == 1 and found.per_class == {"road": 0.75}
    assert found.metrics() == {"mIoU": 0.75, "mAcc": 0.75, "pAcc": 0.75}


def test_mistakes_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    meter = SegmentationMeter(NAMES)
    with pytest.raises(LinvitError, match="label 4, but there are 4 categories"):
        meter.add(torch.zeros(1, 2, 2, dtype=torch.long), [torch.full((2, 2), 4)])
    meter.add(torch.zeros(1, 2, 2, dtype=torch.long), [torch.full((2, 2), 255, dtype=torch.uint8)])
    with pytest.raises(LinvitError, match=r"labels of \(2, 3\) do not fit the truth of \(2, 2\)"):
        meter.add(torch.zeros(1, 2, 3, dtype=torch.long), [torch.zeros(2, 2)])
    with pytest.raises(LinvitError, match="no labelled pixel"):
        meter.compute()
    monkeypatch.setitem(sys.modules, "torchmetrics.classification", None)
    with pytest.raises(LinvitError, match=r"pip install linvit\[dense\]"):
        SegmentationMeter(NAMES)
