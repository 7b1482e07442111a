"""What detectors and segmenters minimise. They give their losses themselves; a converted one first learns, without
labels, to give its head the maps that the head learned to read.

Alignment is between backbones. The head of a trained model stays as it is and is not even run, so a stage costs what
the backbones cost, and boxes and masks are not needed.
"""

import torch
from torch import Tensor, nn

from linvit.errors import LinvitError
from linvit.training.contract import Batch, Objective, blocks_around_hosts, images_of
from linvit.training.objectives.alignment import hosts_to_align
from linvit.training.objectives.distillation import Distance
from linvit.training.objectives.teacher import Activations, Teacher


def body(model: nn.Module) -> nn.Module:
    """What alignment compares: of a detector or segmenter its backbone, of other models all."""
    found = getattr(model, "backbone", None)
    return found if isinstance(found, nn.Module) else model


class InBody(Objective):
    """An objective of backbones, for a whole model."""

    def __init__(self, inner: Objective) -> None:
        self.inner, self.teacher, self.distance = inner, inner.teacher, inner.distance
        self.activations = inner.activations

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        return self.inner(body(model), batch)

    def repeated(self, model: nn.Module) -> list[nn.Module]:
        return self.inner.repeated(body(model))


class MapAlignment(Objective):
    """The maps that the head reads, and the blocks on the way to them, learn to be the teacher's. Teacher and student
    are backbones."""

    teacher: Teacher
    distance: Distance

    def __init__(self, teacher: Teacher, student: nn.Module) -> None:
        hosts_to_align(teacher.model, student)
        self.teacher, self.distance = teacher, Distance()
        self.blocks = blocks_around_hosts(student)
        self.activations = [Activations(model, outputs=self.blocks) for model in (student, teacher.model)]

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        images, (ours, theirs) = images_of(batch)[0], self.activations
        theirs.record()
        wanted = self.teacher.output(images)
        ours.record()
        given = model(images)
        seen, shown = ours.take()[1], theirs.take()[1]
        maps = self.apart(given, wanted)
        blocks = torch.stack([self.distance(seen[name], shown[name]) for name in self.blocks])
        return {"loss": maps.mean() + blocks.mean(), "maps": maps.mean().detach(), "worst": maps.max().detach()}

    def apart(self, ours: list[Tensor], theirs: list[Tensor]) -> Tensor:
        return torch.stack([self.distance(one, other.float()) for one, other in zip(ours, theirs, strict=True)])


class ModelLosses(Objective):
    """The losses that the model itself gives for images and targets, added up. With a teacher, the distance between
    the maps that the two heads read is added with `weight`."""

    def __init__(self, student: nn.Module, teacher: Teacher | None = None, weight: float = 0.0) -> None:
        self.weight = weight
        if teacher is not None:
            if not isinstance(getattr(student, "backbone", None), nn.Module):
                raise LinvitError(f"{type(student).__name__} has no backbone whose maps could be compared")
            self.teacher, self.distance = teacher, Distance()
            self.activations = [Activations(student, outputs=["backbone"], whole=True)]

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        images, targets = batch
        for recorded in self.activations:
            recorded.record()
        losses = model(images, targets)
        loss = torch.stack([part.float() for part in losses.values()]).sum()
        entries = {name: part.detach() for name, part in losses.items()}
        if self.teacher is not None and self.distance is not None:
            given, wanted = self.activations[0].take()[1]["backbone"], self.teacher.output(images)
            maps = torch.stack([self.distance(one, other.float()) for one, other in zip(given, wanted, strict=True)])
            loss, entries["maps"] = loss + self.weight * maps.mean(), maps.mean().detach()
        return {"loss": loss, **entries}
