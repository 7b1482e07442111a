"""What a detector sees, drawn on the image."""

from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image, ImageDraw
from torch import Tensor

from linvit.figures.classes import Chips, Place, as_picture, class_colour, paint, text_size


def draw_detections(
    image: Tensor | Image.Image, prediction: Mapping[str, Any], names: Sequence[str], threshold: float = 0.5
) -> Image.Image:
    """A picture with the boxes, classes, scores and masks of detections that score at least `threshold`; those that
    score best are on top."""
    picture = as_picture(image)
    kept = (prediction["scores"] >= threshold).nonzero().flatten()
    kept = kept[prediction["scores"][kept].argsort(descending=True)]
    boxes, scores, labels = (prediction[name][kept].tolist() for name in ("boxes", "scores", "labels"))
    size = text_size(picture)
    edge = max(2, size // 6)
    if prediction.get("masks") is not None:
        for mask, label in reversed(list(zip(prediction["masks"][kept].cpu() > 0.5, labels, strict=True))):
            picture = paint(picture, mask.numpy(), class_colour(label), 0.4, edge // 2)
    draw, chips = ImageDraw.Draw(picture), Chips(size)
    texts = [f"{names[label]} {score:.2f}" for label, score in zip(labels, scores, strict=True)]
    places = chip_places(boxes, [chips.width(text) for text in texts], chips.height, picture)
    for box, label in reversed(list(zip(boxes, labels, strict=True))):
        draw.rectangle(within(box, picture), outline=class_colour(label), width=edge)
    for (left, top), text, label in reversed(list(zip(places, texts, labels, strict=True))):
        chips.draw(draw, left, top, text, class_colour(label))
    return picture


def within(box: Sequence[float], picture: Image.Image) -> Place:
    """The box on whole pixels of the picture."""
    right, bottom = picture.width - 1, picture.height - 1
    left, top = (min(max(round(value), 0), end) for value, end in zip(box[:2], (right, bottom), strict=True))
    return left, top, min(max(round(box[2]) - 1, left), right), min(max(round(box[3]) - 1, top), bottom)


def chip_places(
    boxes: Sequence[Sequence[float]], widths: Sequence[float], height: int, picture: Image.Image
) -> list[tuple[float, float]]:
    """Where each name goes, best first: above the box, in it or below it, wherever it is still free."""
    taken: list[Place] = []
    for box, width in zip(boxes, widths, strict=True):
        left, top, _, bottom = within(box, picture)
        left = max(min(left, picture.width - width), 0)
        rows = [y for y in (top - height, top, bottom + 1, bottom + 1 - height) if 0 <= y <= picture.height - height]
        places = [(left, y, left + width, y + height) for y in [*rows, max(top, 0)]]
        free = [place for place in places if not any(overlap(place, other) for other in taken)]
        taken.append((free or places)[0])
    return [place[:2] for place in taken]


def overlap(one: Place, other: Place) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
