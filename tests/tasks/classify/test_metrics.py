"""Rates, teacher distances, and intervals that hold what they promise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn import functional as F

from linvit.errors import LinvitError
from linvit.tasks.classify.metrics import Evaluation, evaluate, gather, paired_difference
from linvit.tasks.classify.preprocessing import Preprocessing
from linvit.tasks.classify.resident import Pixels, Resident
from linvit.training.objectives.teacher import Teacher

SIZE = Preprocessing((4, 4), (0.5,), (0.5,))


class Linear(nn.Module):
    def __init__(self, seed: int, classes: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(16, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layer(images.flatten(1))


def source(batch: int = 9) -> Resident:
    torch.manual_seed(0)
    pixels = Pixels("noise", torch.randint(0, 256, (50, 1, 4, 4), dtype=torch.uint8), torch.randint(0, 7, (50,)))
    return Resident(pixels, SIZE, batch, 7)


def test_rates_are_what_one_counts_by_hand() -> None:
    model, teacher = Linear(1).train(), Linear(2)
    found = evaluate(model, source(), classes="abcdefg", teacher=Teacher(teacher))
    assert model.training
    images, labels = next(iter(source(50).epoch(0)))
    logits, wanted = model(images).detach(), teacher(images)
    chosen = logits.argmax(-1)
    right = (chosen == labels).float()
    assert found.top1 == pytest.approx(100 * float(right.mean()))
    five = logits.argsort(descending=True)[:, :5]
    assert found.top5 == pytest.approx(100 * float((five == labels[:, None]).any(1).float().mean()))
    assert found.agreement == pytest.approx(100 * float((chosen == wanted.argmax(-1)).float().mean()))
    kl = F.kl_div(logits.log_softmax(-1), wanted.softmax(-1), reduction="batchmean")
    assert found.kl == pytest.approx(float(kl), rel=1e-4)
    assert found.standard_error == pytest.approx(100 * float(right.std(correction=0)) / 50**0.5, rel=1e-4)
    assert found.per_class["c"] == pytest.approx(100 * float(right[labels == 2].mean()))
    assert np.array_equal(found.correct, right.numpy() > 0)


def test_processes_put_their_images_back_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.arange(14.0).reshape(7, 2)

    def collect(parts: list[np.ndarray], own: np.ndarray) -> None:
        parts[:] = [whole[rank::3] for rank in range(3)]

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    monkeypatch.setattr(torch.distributed, "all_gather_object", collect)
    assert np.array_equal(gather(whole[1::3]), whole)


def test_what_is_saved_can_be_paired(tmp_path: Path) -> None:
    evaluate(Linear(1), source()).save(tmp_path / "a.json")
    data = json.loads((tmp_path / "a.json").read_text())
    assert len(data["labels"]) == len(data["chosen"]) == data["images"] == 50
    assert np.mean(np.equal(data["labels"], data["chosen"])) * 100 == pytest.approx(data["top1"])
    assert "agreement" not in data


def test_an_empty_set_and_a_foreign_teacher_are_refused() -> None:
    class Empty:
        batches = images = 0

        def epoch(self, epoch: int, skip: int = 0):
            return iter(())

    with pytest.raises(LinvitError, match="no image"):
        evaluate(Linear(1), Empty())
    with pytest.raises(LinvitError, match="the teacher has 9 classes, the student 7"):
        evaluate(Linear(1), source(), teacher=Teacher(Linear(1, classes=9)))


def test_one_seed_is_the_paired_t_test_over_images() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.random(400) < 0.8, draw.random(400) < 0.75
    found = paired_difference(a, b, level=0.9)
    test = stats.ttest_rel(100.0 * a, 100.0 * b).confidence_interval(0.9)
    assert found.interval == pytest.approx((test.low, test.high))
    assert found.seeds_interval is None and (found.seeds, found.images) == (1, 400)


def test_the_interval_over_seeds_is_the_paired_t_test() -> None:
    draw = np.random.default_rng(0)
    a, b = draw.random((8, 300)) < 0.8, draw.random((8, 300)) < 0.75
    found = paired_difference(a, b)
    test = stats.ttest_rel(100 * a.mean(1), 100 * b.mean(1)).confidence_interval(0.95)
    assert found.seeds_interval == pytest.approx((test.low, test.high))
    assert found.mean == pytest.approx(100 * (a.mean() - b.mean()))


@pytest.mark.parametrize(("seeds", "images"), [(3, 200), (8, 200)])
def test_nineteen_of_twenty_intervals_hold_the_truth(seeds: int, images: int) -> None:
    """Images that are hard for one model and not for the other, and seeds that are better or worse everywhere."""
    draw = np.random.default_rng(1)
    held = 0
    for _ in range(300):
        rates = [
            np.clip(0.6 + 0.15 * draw.standard_normal(images) + 0.02 * draw.standard_normal((seeds, 1)), 0, 1)
            for _ in range(2)
        ]
        a, b = (draw.random((seeds, images)) < rate for rate in rates)
        low, high = paired_difference(a, b).interval
        held += low <= 0 <= high
    assert held / 300 > 0.915


def test_tables_must_match() -> None:
    with pytest.raises(LinvitError, match="cannot pair"):
        paired_difference(np.ones((3, 10)), np.ones((2, 10)))
    same = paired_difference(np.ones((3, 10)), np.ones((3, 10)))
    assert same.mean == 0 and same.interval == (0, 0)


def test_evaluation_without_a_teacher_has_no_distance_to_it() -> None:
    found = Evaluation(np.array([0, 1]), np.array([0, 0]), np.array([True, True]))
    assert found.metrics() == {"top1": 50.0, "standard_error": pytest.approx(35.36, abs=0.01), "top5": 100.0}
    assert found.per_class == {"0": 100.0, "1": 0.0}
