"""Which output of a model stands for which class of a set: by name where both have names, else by position.

A model has the names it was trained with. timm's ImageNet models are told by how many outputs they have; their names
are WordNet's synsets, n01440764 and so on, and count where a set's classes are called so.
"""

from __future__ import annotations

from collections.abc import Sequence

from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn

from linvit.conversion.saving import label_names, note
from linvit.errors import LinvitError
from linvit.tasks.classify.data import Images, Stream, check_outputs

Split = Images | Stream


def match_sets(train: Split, validation: Split | None, model: nn.Module, outputs: int) -> tuple[Split, Split | None]:
    """Sets to train and validate with, labelled by the model's outputs. The model is given the names: its own, else
    those of the training set, in their order, and none for outputs that are left over."""
    if train.labelled and train.classes:
        names = names_for(train, model, outputs)
        if not names:
            check_outputs(train, outputs)
            names = (*train.classes, *("" for _ in range(outputs - len(train.classes))))
        note(model, label_names=tuple(names))
    return match_classes(train, model, outputs), validation and match_classes(validation, model, outputs)


def match_classes(images: Split, model: nn.Module, outputs: int) -> Split:
    """The images labelled by the model's outputs."""
    named = isinstance(images, Images) and images.labelled and images.classes
    names = names_for(images, model, outputs) if named else ()
    if isinstance(images, Images) and names:
        return images.renumbered(names)
    check_outputs(images, outputs)
    if named and len(images.classes) < outputs:
        imagenet = f"name its class folders by synset, such as {synsets(outputs)[0]}" if synsets(outputs) else ""
        raise LinvitError(
            f"{images.name} has {len(images.classes)} classes, the model {outputs} outputs, and it is not known which "
            f"are which: {imagenet or f'give images of all {outputs}'}, or take a model that was trained on this set"
        )
    return images


def names_for(images: Split, model: nn.Module, outputs: int) -> Sequence[str]:
    """The names of the model's outputs, as far as they are known and speak of such classes."""
    names = label_names(model)
    if names:
        return names
    known = synsets(outputs)
    shared = set(images.classes) & set(known)
    part = len(images.classes) < outputs  # a set of as many classes may be another one, of which positions are right
    return known if len(shared) == len(images.classes) or (shared and part) else ()


def synsets(outputs: int) -> Sequence[str]:
    """The classes of ImageNet, or of what else of it has so many; none where nothing has."""
    subset = infer_imagenet_subset({"num_classes": outputs})
    return ImageNetInfo(subset).label_names() if subset else ()
