"""What a model says of photographs: `linvit.predict`, for classifiers, detectors and segmenters."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from linvit.conversion import open_model
from linvit.errors import LinvitError
from linvit.images import eight_bits, images_below, naming, upright
from linvit.models.dense import HEADS, DenseModel
from linvit.models.labels import known_class_names
from linvit.tasks.classify.augmenting import normalise, statistics
from linvit.tasks.classify.checks import check_size, outputs_of
from linvit.tasks.classify.decoding import channels_first
from linvit.tasks.classify.preprocessing import Preprocessing
from linvit.tasks.dense.files import Files
from linvit.tasks.dense.fitting import trained_settings
from linvit.tasks.dense.loading import batch_of
from linvit.tasks.dense.pixels import open_picture
from linvit.tasks.dense.transforms import label_map, to_original
from linvit.tasks.detect.drawing import draw_detections
from linvit.tasks.kinds import Model
from linvit.tasks.segment.drawing import draw_segmentation
from linvit.training import Processes
from linvit.training.objectives.teacher import logits_of

FIRST = 5  # classes of a classifier that are told

Photograph = str | Path | Image.Image | Tensor


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a model says of an image: a file, a picture, or bytes `(3, height, width)`; `size` is height and width."""

    image: Photograph = field(repr=False)
    size: tuple[int, int]
    names: tuple[str, ...] = field(repr=False)  # of the model's classes

    def draw(self) -> Image.Image:
        """The image with what was found drawn on it."""
        raise LinvitError("what a classifier says cannot be drawn: give a detector or a segmenter")

    def to_dict(self) -> dict[str, Any]:
        """What was found, as plain data."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.image) if isinstance(self.image, str | Path) else f"{self.size[1]}×{self.size[0]} pixels"


@dataclass(frozen=True, kw_only=True)
class Classified(Prediction):
    """The likeliest classes with their probabilities."""

    classes: tuple[tuple[str, float], ...]

    def to_dict(self) -> dict[str, Any]:
        return {"classes": [{"class": name, "probability": share} for name, share in self.classes]}


@dataclass(frozen=True, kw_only=True)
class Detected(Prediction):
    """Objects, best first: `boxes` `(n, 4)` as left, top, right, bottom in pixels, `scores`, `labels`, and of models
    with masks `masks` `(n, height, width)`."""

    boxes: Tensor = field(repr=False)
    scores: Tensor = field(repr=False)
    labels: Tensor = field(repr=False)
    masks: Tensor | None = field(default=None, repr=False)

    @property
    def objects(self) -> list[tuple[str, float, tuple[float, ...]]]:
        """Class, score and box of each."""
        rows = zip(self.labels.tolist(), self.scores.tolist(), self.boxes.tolist(), strict=True)
        return [(self.names[label], score, tuple(box)) for label, score, box in rows]

    def draw(self) -> Image.Image:
        found = {"boxes": self.boxes, "scores": self.scores, "labels": self.labels, "masks": self.masks}
        return draw_detections(opened(self.image), found, self.names, threshold=0.0)

    def to_dict(self) -> dict[str, Any]:
        return {"objects": [{"class": name, "score": score, "box": list(box)} for name, score, box in self.objects]}


@dataclass(frozen=True, kw_only=True)
class Segmented(Prediction):
    """The class of each pixel, `labels` `(height, width)`."""

    labels: Tensor = field(repr=False)

    @property
    def shares(self) -> dict[str, float]:
        """How much of the image each class takes, the largest first."""
        counts = torch.bincount(self.labels.flatten().int(), minlength=len(self.names)) / self.labels.numel()
        order = counts.argsort(descending=True, stable=True).tolist()
        return {self.names[label]: float(counts[label]) for label in order if counts[label]}

    def draw(self) -> Image.Image:
        return draw_segmentation(opened(self.image), self.labels, self.names)

    def to_dict(self) -> dict[str, Any]:
        return {"shares": self.shares}


def predict(
    model: Model,
    images: Photograph | Sequence[Photograph],
    *,
    threshold: float = 0.5,
    size: int | None = None,
    device: str = "auto",
) -> list[Prediction]:
    """What a model says of each image, in the image's own pixels: `Classified`, `Detected` or `Segmented`.

    `model` is a model, a folder that linvit saved or the name of a pretrained timm model. An image is a file of any
    size, a folder of them, a picture or bytes `(3, height, width)`. It comes to the model as in its training, or at
    another `size`. Of a detector, objects that score at least `threshold` are told. `draw()` gives a picture.
    """
    given = [images] if isinstance(images, str | Path | Image.Image | Tensor) else list(images)
    say = Predictor(model, threshold=threshold, size=size, device=device)
    return [say(image) for image in found_images(given)]


def found_images(given: Sequence[Photograph]) -> list[Photograph]:
    """The images, and in the place of a folder those in it and below."""
    found: list[Photograph] = []
    for image in given:
        if isinstance(image, str | Path) and os.path.isdir(image):
            below = sorted(images_below(Path(image)))
            if not below:
                raise LinvitError(f"there is no image in {image}: give another folder, or files")
            found += [Path(name) for name in below]
        else:
            found.append(image)
    return found


def opened(image: Photograph) -> Tensor:
    """An image as bytes `(3, height, width)`, turned as its EXIF says."""
    if isinstance(image, str | Path):
        path = Path(image)
        if not path.exists():
            raise LinvitError(f"there is no image {path}")
        with naming(str(path)):
            return opened(open_picture(Files(path.parent), path.name))
    if isinstance(image, Image.Image):
        return channels_first(eight_bits(upright(image)).convert("RGB"))
    if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] != 3:
        raise LinvitError("an image as a tensor has bytes (3, height, width): give such a one, or a file")
    return image


class Predictor:
    """A model that is asked again and again; `drawn` says whether its answers can be drawn."""

    def __init__(self, model: Model, *, threshold: float = 0.5, size: int | None = None, device: str = "auto") -> None:
        if str(model) in HEADS:
            raise LinvitError(f"{model} has learnt nothing: give a folder that linvit train wrote")
        self.model: Any = model if isinstance(model, nn.Module) else open_model(str(model))
        self.device, self.size, self.threshold = Processes(device).device, size, threshold
        self.model.to(self.device).eval()
        self.drawn = isinstance(self.model, DenseModel)
        self.names = class_names(self.model)
        if size is not None and not self.drawn:
            shape = Preprocessing.of(self.model, size)
            check_size(self.model, shape.size, len(shape.mean))

    def __call__(self, image: Photograph) -> Prediction:
        pixels = opened(image)
        about: dict[str, Any] = {"image": image, "size": tuple(pixels.shape[-2:]), "names": self.names}
        with torch.inference_mode():
            if not isinstance(self.model, DenseModel):
                return Classified(**about, classes=self.classify(pixels))
            if self.model.task == "detect":
                return Detected(**about, **self.detect(pixels))
            return Segmented(**about, labels=self.segment(pixels))

    def classify(self, pixels: Tensor) -> tuple[tuple[str, float], ...]:
        how = Preprocessing.of(self.model, self.size)
        picture = Image.fromarray(pixels.permute(1, 2, 0).cpu().numpy()).convert(how.mode)
        seen = normalise(how.evaluation()(picture)[None].to(self.device), *statistics(how, self.device))
        likely = finite(logits_of(self.model(seen))[0]).float().softmax(-1).topk(min(FIRST, len(self.names)))
        places = zip(likely.indices.tolist(), likely.values.tolist(), strict=True)
        return tuple((self.names[place], share) for place, share in places)

    def detect(self, pixels: Tensor) -> dict[str, Any]:
        images, targets = batch_of([pixels], trained_settings(self.model, self.size), self.device)
        found = self.model(images, targets)[0]
        kept = finite(found["scores"]) >= self.threshold
        found = to_original({name: value[kept] for name, value in found.items()}, targets[0])
        return {name: value.cpu() for name, value in found.items()}

    def segment(self, pixels: Tensor) -> Tensor:
        images, targets = batch_of([pixels], trained_settings(self.model, self.size), self.device)
        return label_map(finite(self.model(images, targets)[0]), targets[0]).cpu()


def class_names(model: nn.Module) -> tuple[str, ...]:
    """Names of a model's outputs, or numbers where they are not known."""
    outputs = outputs_of(model)
    return known_class_names(model) or tuple(f"class {place}" for place in range(outputs))


def finite(answer: Tensor) -> Tensor:
    if not bool(answer.isfinite().all()):
        raise LinvitError("the model gives NaN or infinity: train it again")
    return answer
