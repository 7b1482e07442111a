"""kNN, probe and nearest neighbours beside scikit-learn's."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from linvit.tasks.features import metrics
from linvit.tasks.features.fitting import FeatureTask
from linvit.tasks.features.metrics import FeatureEvaluation, Gallery, collect, knn, nearest, probe
from linvit.training.objectives.final import Features

CLASSES, WIDTH = 7, 12


def clouds(images: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features of classes that overlap, channels of very different size, one of them constant."""
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (images,), generator=draw)
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(0))
    found = centres[labels] + 1.2 * torch.randn(images, WIDTH, generator=draw)
    found = found * torch.logspace(-2, 2, WIDTH)
    found[:, 3] = 5.0
    return found, labels


def test_knn_is_dinos() -> None:
    (features, labels), (asked, _) = clouds(301, 1), clouds(83, 2)
    reference = KNeighborsClassifier(20, metric="cosine", weights=lambda apart: np.exp((1 - apart) / 0.07))
    wanted = reference.fit(features.double().numpy(), labels).predict(asked.double().numpy())
    found = knn(features, labels, asked, CLASSES)
    assert (found.numpy() == wanted).all() and len(set(wanted)) > 3
    few = knn(features[:5], labels[:5], asked, CLASSES)
    assert len(few) == 83, "fewer images than neighbours will do"


def test_knn_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    (features, labels), (asked, _) = clouds(301, 1), clouds(83, 2)
    whole = knn(features, labels, asked, CLASSES), nearest(features)
    monkeypatch.setattr(metrics, "CHUNK", 10)
    assert torch.equal(knn(features, labels, asked, CLASSES), whole[0]) and torch.equal(nearest(features), whole[1])


def test_the_probe_is_ridge_regression() -> None:
    (features, labels), (asked, truth) = clouds(75, 1), clouds(400, 2)
    draw = torch.Generator().manual_seed(3)  # noise, which only a strong penalty keeps out
    features, asked = (torch.cat([each, torch.randn(len(each), 40, generator=draw)], 1) for each in (features, asked))
    x, y, shares = features.double().numpy(), labels.numpy(), np.eye(CLASSES)[labels.numpy()]
    held = np.arange(len(y)) % 5 == 4

    def fitted(rows: np.ndarray, penalty: float, questions: np.ndarray) -> np.ndarray:
        scale = StandardScaler().fit(x[rows])
        made = Ridge(alpha=penalty * rows.sum()).fit(scale.transform(x[rows]), shares[rows])
        return made.predict(scale.transform(questions)).argmax(1)

    right = [(fitted(~held, penalty, x[held]) == y[held]).sum() for penalty in metrics.PENALTIES]
    best = metrics.PENALTIES[int(np.argmax(right))]
    assert len(set(right)) > 2, "the penalty matters here"
    wanted = fitted(np.ones(len(y), bool), best, asked.double().numpy())
    found = probe(features, labels, asked, CLASSES)
    assert (found.numpy() == wanted).all() and 0.3 < (found == truth).float().mean() < 0.99
    assert set(probe(features[:1], labels[:1], asked, CLASSES).tolist()) == {int(labels[0])}


def test_nearest_neighbours() -> None:
    features, _ = clouds(97, 3)
    found = NearestNeighbors(n_neighbors=2, metric="cosine").fit(features.double().numpy())
    wanted = found.kneighbors(features.double().numpy(), return_distance=False)[:, 1]
    assert (nearest(features).numpy() == wanted).all()


class Source:
    """Pictures whose features are their pixels."""

    images, batches = 10, 3

    def __init__(self, table: Tensor, labels: Tensor) -> None:
        self.table, self.labels = table, labels

    def epoch(self, epoch: int, skip: int = 0, *, mixed: bool = True) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(self.table.split(4), self.labels.split(4), strict=True)


def test_features_that_are_not_finite_are_counted() -> None:
    table, labels = clouds(10, 4)
    table[6, 2] = torch.nan
    gallery, broken = collect(lambda images: Features(images[:, None], images), Source(table, labels))
    assert broken == 1 and bool(gallery.features.isfinite().all()) and torch.equal(gallery.labels, labels)
    right = Gallery(*clouds(60, 5)).judge(gallery.features, labels)
    assert [len(each) for each in right] == [10, 10]


def test_the_metrics_of_an_evaluation() -> None:
    found = FeatureEvaluation(
        2, np.array([0.5, 1.0]), np.array([0.9, 0.7]), neighbours=np.array([True, False]), knn=np.array([True, True])
    )
    wanted = {"cosine": 0.775, "patch_cosine": 0.75, "class_cosine": 0.8, "neighbours": 50.0, "knn": 100.0}
    assert found.metrics() == pytest.approx(wanted)
    assert FeatureTask(None).best == "" and FeatureTask(Source(*clouds(10, 4))).best == "cosine"
