"""The result files' one schema: a run (or teacher), a speed, a failure, as typed values that the codec reads and
writes.

Who makes a result fills these in, the store keeps them as JSON (`files`), statistics and report read them. A field that
came later has a default, so that older files still read; fields that a file has and this version does not know are
passed over.
"""

import base64
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from linvit.errors import LinvitError
from linvit.models.dense import HEADS

VERSION = 1  # of the result files
KEY = re.compile(r"[0-9a-f]{16}")
SPARSE = {"sparse": True}
TOP1 = "top1"  # what classifiers are judged by
SCORE = {"key": TOP1}  # of a file's main metric, which was top-1 when there was no other


@dataclass(frozen=True)
class Candidate:
    """A plan or a mechanism by its name, with its options; a plan that was a file comes along whole."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    plan: dict[str, Any] | None = field(default=None, metadata=SPARSE)

    @property
    def measured(self) -> bool:
        """Whether the quadratic layers of MixA are to be measured: `mixa:keep=6,layers=measured`."""
        return self.name == "mixa" and self.options.get("layers") == "measured"


SOFTMAX = Candidate("softmax")


@dataclass(frozen=True, kw_only=True)
class Structure:
    """What a candidate is as a model: the part of an identity that runs and speeds share."""

    architecture: dict[str, Any]
    classes: int
    candidate: Candidate
    patch_size: int | None
    size: int

    @property
    def head(self) -> str:
        """The name of the detector or segmenter that it is; empty for classifiers."""
        model = str(self.architecture.get("model", ""))
        return model if model in HEADS else ""


@dataclass(frozen=True)
class Named:
    """What lies somewhere, by its name and what tells it from others of that name: a set of images, or a teacher from
    elsewhere, which is a folder that linvit saved or a timm model. That has no digest."""

    name: str
    digest: str | None


@dataclass(frozen=True)
class TrainedTeacher:
    """A teacher that was trained as part of the comparison."""

    key: str
    identity: "TrainingIdentity"


@dataclass(frozen=True, kw_only=True)
class TrainingIdentity(Structure):
    """All that determines the result of a run or of a teacher."""

    kind: str
    mode: str
    data: Named
    config: dict[str, Any]
    seed: int
    teacher: TrainedTeacher | Named | None = None
    task: str = field(default="", metadata=SPARSE)  # features: learnt without labels; else what the model is made for


@dataclass(frozen=True, kw_only=True)
class SpeedIdentity(Structure):
    """All that determines what is timed."""

    kind: str = "speed"
    ladder: tuple[int, ...]
    batch: int
    precision: str
    compile: bool
    cuda_graph: bool | None = field(default=None, metadata=SPARSE)  # None: from before there were any
    devices: tuple[str, ...]


Identity = TrainingIdentity | SpeedIdentity


@dataclass(frozen=True, kw_only=True)
class Label:
    """What people call a candidate, and where it stands in the grid."""

    candidate: str
    mechanism: str
    paper: str = ""
    patch: int | None
    size: int
    seed: int | None = field(default=None, metadata=SPARSE)  # None: a speed, which has none
    mode: str


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Where and with what a result was made, as `measurement.record.environment` tells it."""

    hardware: str
    cpu: str | None = None
    threads: int | None = None
    python: str | None = None
    torch: str | None = None
    triton: str | None = None
    cuda: str | None = None
    timm: str | None = None
    linvit: str | None = None
    commit: str | None = None
    source: str | None = None
    command: str | None = None
    time: str
    packages: dict[str, str] | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class DataFacts(Named):
    train: int | None
    validation: int


@dataclass(frozen=True)
class ModelFacts:
    """Parameters, MACs of one image, and the tokens it is cut into. `counted` names the part that the MACs are of,
    where the rest depends on what is on the image."""

    parameters: int
    macs: int
    tokens: int | None
    counted: str | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class EpochAccuracy:
    epoch: float
    score: float = field(metadata=SCORE)
    loss: float | None
    seconds: float


@dataclass(frozen=True)
class Accuracy:
    """What the last weights get right, in percent, and how it came about; epoch 0 is before any training. `score` is
    the top-1 of a classifier, the mAP of a detector, the mIoU of a segmenter, the kNN accuracy of a backbone or without
    labels its cosine with the teacher, as `metric` says."""

    epochs: tuple[EpochAccuracy, ...]
    score: float = field(metadata=SCORE)
    top5: float | None
    best: float
    standard_error: float | None
    loss: float | None
    correct: str  # a bit for each validation image, in base64; empty where images are not right or wrong
    metric: str = field(default=TOP1, metadata=SPARSE)
    metrics: dict[str, float] = field(default_factory=dict, metadata=SPARSE)  # all, where there are others than top-1
    right: dict[str, str] = field(default_factory=dict, metadata=SPARSE)  # of these, as `correct` is of the score
    per_class: dict[str, float] = field(default_factory=dict, metadata=SPARSE)  # the metric, of each class


@dataclass(frozen=True)
class Training:
    seconds: float
    images_per_second: float | None
    peak_bytes: int | None
    device: str
    shared: int  # runs that had the device at that time


@dataclass(frozen=True)
class Drift:
    """How far the answers move in half precision; None where the device cannot do it."""

    dtype: str
    relative_rms: float | None
    agreement: float | None
    finite: bool | None
    note: str | None = field(default=None, metadata=SPARSE)


@dataclass(frozen=True)
class ConversionResult:
    """What the conversion did, and how near the candidate came to its teacher."""

    zero_shot: float
    teacher_score: float = field(metadata={"key": "teacher_top1"})
    agreement: float | None
    kl: float | None
    report: str | None
    layers: tuple[int, ...] | None = field(default=None, metadata=SPARSE)  # the quadratic ones, where measured


@dataclass(frozen=True)
class Milliseconds:
    """Of a pass over a batch."""

    median: float
    low: float
    high: float


@dataclass(frozen=True, kw_only=True)
class SpeedPoint:
    """One pass at one size, timed; without times, `note` says why."""

    device: str  # cpu or cuda
    size: int
    tokens: int
    batch: int
    what: str = field(default="inference", metadata={"key": "pass"})  # or training
    precision: str = ""
    compiled: bool = False
    cuda_graph: bool = False
    milliseconds: Milliseconds | None = None
    images_per_second: float | None = None
    peak_bytes: int | None = None
    ratio: float | None = None  # softmax's time over this one, measured by turns
    note: str | None = None
    shared: bool = field(default=False, metadata=SPARSE)  # with trainings that had the device at that time

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise LinvitError("a pass over no image was timed")

    @property
    def median(self) -> float | None:
        return self.milliseconds.median if self.milliseconds else None


@dataclass(frozen=True, kw_only=True)
class Result:
    """What every result file begins with."""

    kind: str
    version: int = VERSION
    key: str
    candidate_key: str  # joins runs with speeds
    label: Label
    identity: Identity
    command: str | None = None
    environment: Environment


@dataclass(frozen=True, kw_only=True)
class Run(Result):
    """A trained candidate, or a teacher."""

    identity: TrainingIdentity
    data: DataFacts
    model: ModelFacts
    accuracy: Accuracy
    training: Training
    drift: tuple[Drift, ...] = ()
    conversion: ConversionResult | None = field(default=None, metadata=SPARSE)
    seconds: float

    @property
    def score(self) -> float:
        return self.accuracy.score

    @property
    def by_image(self) -> bool:
        """Whether a validation image is right or wrong: with classifiers."""
        return self.accuracy.metric == TOP1

    @property
    def seed(self) -> int:
        return self.identity.seed

    @cached_property
    def right(self) -> np.ndarray | None:
        """Which validation images it got right; None where nobody can say, or the bits do not fit the accuracy."""
        return self.unpacked(self.accuracy.correct, self.score)

    def right_by(self, metric: str) -> tuple[float, np.ndarray | None]:
        """The same by another metric than the main one, after its value."""
        value = self.accuracy.metrics[metric]
        return value, self.unpacked(self.accuracy.right.get(metric, ""), value)

    def unpacked(self, text: str, score: float) -> np.ndarray | None:
        images = self.data.validation
        try:
            packed = base64.b64decode(text, validate=True)
        except ValueError:
            return None
        bits = np.unpackbits(np.frombuffer(packed, dtype=np.uint8))[:images]
        if not images or len(bits) != images or abs(100 * float(bits.mean()) - score) > 51 / images:
            return None
        return bits.astype(bool)


@dataclass(frozen=True, kw_only=True)
class Speed(Result):
    """A candidate timed on one kind of hardware."""

    identity: SpeedIdentity
    rows: tuple[SpeedPoint, ...]
    seconds: float

    def chip(self, point: SpeedPoint) -> str:
        """The chip that a point was timed on."""
        known = self.environment.cpu if point.device == "cpu" else self.environment.hardware
        return known or point.device


@dataclass(frozen=True, kw_only=True)
class Failure(Result):
    """An attempt that went wrong."""

    error: str
    traceback: str = ""
    attempt: int = 1


AnyResult = Run | Speed | Failure
