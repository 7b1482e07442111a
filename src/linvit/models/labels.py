"""What the outputs of a classifier are called."""

from typing import Any

from timm.data import ImageNetInfo, infer_imagenet_subset

from linvit.conversion.saving import label_names
from linvit.models.dense import DenseModel


def known_class_names(model: Any) -> tuple[str, ...]:
    """Those it was trained on, else ImageNet's in words where it has as many; none where neither is known."""
    outputs = getattr(model, "num_classes", None) or getattr(getattr(model, "config", None), "num_labels", None)
    if (names := label_names(model)) or isinstance(model, DenseModel) or not outputs:
        return names
    subset = infer_imagenet_subset({"num_classes": outputs})
    known = ImageNetInfo(subset) if subset else None
    return () if known is None else tuple(known.index_to_description(place) for place in range(outputs))
