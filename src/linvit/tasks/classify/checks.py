"""What is looked at before a training begins or goes on, each mistake in one line.

Which output of a model stands for which class of a set: by name where both have names, else by position. A model has
the names it was trained with. timm's ImageNet models are told by how many outputs they have; their names are WordNet's
synsets, n01440764 and so on, and count where a set's classes are called so.
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import nn

from linvit.conversion.convert import own_size
from linvit.conversion.saving import label_names, note
from linvit.errors import LinvitError, reason
from linvit.tasks.classify.data import Images, Split, check_outputs
from linvit.training.config import Config


def check_labels(config: Config, train: Split, validation: Split | None) -> None:
    """Whether what has no labels needs none."""
    if not train.labelled and config.needs_labels:
        hint = "set distillation_weight=1" if config.distillation != "none" else "choose a recipe with a teacher"
        raise LinvitError(f"{train.name} has no labels to learn from: {hint}, or put images in CLASS folders")
    if validation is not None and train.labelled and not validation.labelled:
        raise LinvitError(f"{validation.name} has no labels to validate by: put images in CLASS folders")


def check_size(model: nn.Module, size: tuple[int, int], channels: int) -> None:
    """Whether the model takes images of this size; many are built for one."""
    reason = refusal(model, size, channels)
    if reason:
        hint = "set size=none random_sizes= for its own size, or build it with --model-arg dynamic_img_size=true"
        raise LinvitError(f"{type(model).__name__} cannot take images of {pixels(size)} ({reason}): {hint}")


def check_teacher_size(teacher: nn.Module, size: tuple[int, int], channels: int) -> None:
    """Whether the teacher takes the images that the student sees."""
    first = next((module for module in teacher.modules() if isinstance(module, nn.Conv2d)), None)
    if first is not None and first.in_channels != channels:
        counts = f"{first.in_channels} channels and the student's have {channels}"
        raise LinvitError(f"the teacher is for images of {counts}: choose another teacher")
    reason = refusal(teacher, size, channels)
    if reason:
        theirs, ours = pixels(own_size(teacher)), pixels(size)
        apart = f"the teacher is for images of {theirs} and the student's have {ours} ({reason})"
        raise LinvitError(f"{apart}: choose a teacher for {ours}, or a student for {theirs}")


def pixels(size: tuple[int, int]) -> str:
    return f"{'×'.join(str(side) for side in dict.fromkeys(size))} pixels"


@torch.no_grad()
def refusal(model: nn.Module, size: tuple[int, int], channels: int) -> str | None:
    """Why the model takes no images of this size; none where it does."""
    like = next(model.parameters())
    training = model.training
    try:
        model.eval()(torch.zeros(1, channels, *size, device=like.device, dtype=like.dtype))
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        return reason(error)
    finally:
        model.train(training)
    return None


def outputs_of(model: Any) -> int:
    """How many classes a model tells apart."""
    found = getattr(model, "num_classes", None) or getattr(getattr(model, "config", None), "num_labels", None)
    if not isinstance(found, int) or found < 1:
        raise LinvitError(f"{type(model).__name__} has no classifier: create it with num_classes=…")
    return found


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
        known = synsets(outputs)
        hint = f"name its class folders by synset, such as {known[0]}" if known else f"give images of all {outputs}"
        few = f"{images.name} has {len(images.classes)} classes, the model {outputs} outputs, and it is not known which"
        raise LinvitError(f"{few} are which: {hint}, or take a model that was trained on this set")
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
