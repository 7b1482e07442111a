"""What a trained candidate is worth, as its result says it: of classifiers image by image and in half precision too, of
detectors and segmenters by the metrics of a whole set, of backbones by kNN, probe and nearness to the teacher."""

import base64
import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from linvit.comparison.results import TOP1, Accuracy, ConversionResult, Drift, EpochAccuracy
from linvit.comparison.scheduling.execution.sharing import Bench
from linvit.measurement.speed import relative_rms
from linvit.tasks.classify.fitting import ClassifierFitting
from linvit.tasks.classify.metrics import Evaluation
from linvit.tasks.dense.fitting import BEST, DenseFitting
from linvit.tasks.features.fitting import FeatureFitting
from linvit.training import BatchSource
from linvit.training.engine.phases import repeatable
from linvit.training.objectives.teacher import logits_of

DRIFT_IMAGES = 512
Records = Sequence[Mapping[str, Any]]  # of the log: evaluations, the first before any training


@dataclass(frozen=True)
class Judged:
    """What a run's result says of its weights, and of how many validation images."""

    images: int
    accuracy: Accuracy
    conversion: ConversionResult | None = None
    drift: tuple[Drift, ...] = ()


def judge(fitting: ClassifierFitting | DenseFitting | FeatureFitting, bench: Bench, evaluations: Records) -> Judged:
    if isinstance(fitting, ClassifierFitting):
        return judge_classifier(fitting, bench, evaluations)
    if isinstance(fitting, FeatureFitting):
        return judge_features(fitting, bench, evaluations)
    return judge_dense(fitting, bench, evaluations)


def judge_classifier(fitting: ClassifierFitting, bench: Bench, evaluations: Records) -> Judged:
    final, conversion = fitting.evaluate(bench.guide), None
    assert fitting.checks is not None
    with repeatable(fitting.config.deterministic):
        drift = measure_drift(fitting.shown, fitting.checks)
    if final.teacher is not None:
        taught, zero_shot = 100 * float((final.teacher == final.labels).mean()), evaluations[0][TOP1]
        conversion = ConversionResult(zero_shot, taught, final.agreement, final.kl, bench.report, bench.layers)
    return Judged(len(final.labels), image_by_image(final, evaluations), conversion, drift)


def image_by_image(final: Evaluation, evaluations: Records) -> Accuracy:
    """What the last weights get right, image by image too, and how it came about."""
    names = ("epoch", TOP1, "loss", "seconds")
    return Accuracy(
        epochs=tuple(EpochAccuracy(*(record[name] for name in names)) for record in evaluations),
        score=final.top1,
        top5=final.top5,
        best=max(record[TOP1] for record in evaluations),
        standard_error=final.standard_error,
        loss=final.loss,
        correct=packed(final.correct),
    )


def packed(right: np.ndarray) -> str:
    """A bit for each image, in base64."""
    return base64.b64encode(np.packbits(right).tobytes()).decode()


def judge_features(fitting: FeatureFitting, bench: Bench, evaluations: Records) -> Judged:
    """By kNN where there are labels, else by the cosine with the teacher's features, of which the teacher has 100 %.
    The teacher's own kNN and probe are kept image by image too: differences are to them."""
    final = fitting.evaluate()
    found, right = on_hundred(final.metrics()), {name: packed(bits) for name, bits in final.right.items()}
    metric = "knn" if "knn" in found else "cosine"
    seen = [on_hundred(record)[metric] for record in evaluations]
    curve = zip(evaluations, seen, strict=True)
    score = found[metric]
    accuracy = Accuracy(
        epochs=tuple(EpochAccuracy(record["epoch"], value, None, record["seconds"]) for record, value in curve),
        score=score,
        top5=None,
        best=max(seen),
        standard_error=math.sqrt(score * (100 - score) / final.images) if metric in right else None,
        loss=None,
        correct=right.pop(metric, ""),
        metric=metric,
        metrics=found,
        right=right,
    )
    taught = found.get(f"teacher_{metric}", 100.0)
    return Judged(final.images, accuracy, ConversionResult(seen[0], taught, None, None, bench.report, bench.layers))


def on_hundred(record: Mapping[str, Any]) -> dict[str, float]:
    """The metrics of features, cosines in percent as the others are."""
    names = ("neighbours", "knn", "probe", "teacher_knn", "teacher_probe")
    found = {name: 100 * value for name, value in record.items() if name.endswith("cosine")}
    return found | {name: record[name] for name in names if name in record}


def judge_dense(fitting: DenseFitting, bench: Bench, evaluations: Records) -> Judged:
    final, metric = fitting.evaluate(), BEST[fitting.task.task]
    assert fitting.task.samples is not None
    found, conversion = in_percent(final.metrics()), None
    seen = [in_percent({metric: record[metric]}).get(metric, 0.0) for record in evaluations]
    curve = zip(evaluations, seen, strict=True)
    accuracy = Accuracy(
        epochs=tuple(EpochAccuracy(record["epoch"], score, None, record["seconds"]) for record, score in curve),
        score=found.get(metric, 0.0),
        top5=None,
        best=max(seen),
        standard_error=None,
        loss=None,
        correct="",
        metric=metric,
        metrics=found,
        per_class=in_percent(final.per_class),
    )
    if bench.guide is not None:
        if bench.taught is None:
            bench.taught = in_percent(fitting.evaluate(bench.guide).metrics()).get(metric, 0.0)
        conversion = ConversionResult(seen[0], bench.taught, None, None, bench.report)
    return Judged(len(fitting.task.samples), accuracy, conversion)


def in_percent(fractions: Mapping[str, float]) -> dict[str, float]:
    """Metrics as percentages, without those that nothing was there to judge by: COCO's −1, or NaN."""
    return {name: 100 * value for name, value in fractions.items() if math.isfinite(value) and value >= 0}


@torch.no_grad()
def measure_drift(model: nn.Module, source: BatchSource) -> tuple[Drift, ...]:
    """How far a trained model's answers move when all of it runs in half precision: for each kind the relative RMS of
    the logits against float32, how often the same class is chosen (in percent), and whether all is finite. Weights and
    images are rounded, no autocast helps."""
    batches: list[Tensor] = []
    for batch, _ in source.epoch(0):
        batches.append(batch[: DRIFT_IMAGES - sum(map(len, batches))])
        if sum(map(len, batches)) >= DRIFT_IMAGES:
            break
    truth = answers(model, batches, torch.float32)
    return tuple(drift_of(model, batches, truth, name) for name in ("float16", "bfloat16"))


def drift_of(model: nn.Module, batches: list[Tensor], truth: Tensor, name: str) -> Drift:
    try:
        found = answers(model, batches, getattr(torch, name))
    except (RuntimeError, NotImplementedError) as error:  # an operation that this device has in float32 only
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return Drift(name, None, None, None, reason)
    if not bool(found.isfinite().all()):
        return Drift(name, None, None, False)
    agreement = 100 * float((found.argmax(-1) == truth.argmax(-1)).double().mean())
    return Drift(name, relative_rms(found, truth), agreement, True)


def answers(model: nn.Module, batches: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The logits of all batches, in float64."""
    model = copy.deepcopy(model).to(dtype).eval()
    return torch.cat([logits_of(model(batch.to(dtype))).double() for batch in batches])
