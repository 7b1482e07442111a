"""What the engine asks of data, losses and tasks. None of the three knows the other two.

A batch is any tree of tensors: images and labels, or images with boxes and masks. The engine moves, records and replays
its tensors; only the objective and the task know what they mean.
"""

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as trees

from linvit.conversion.convert import find_hosts

if TYPE_CHECKING:
    from linvit.training.objectives.teacher import Activations, Teacher

Batch = Any


class BatchSource(Protocol):
    """Where batches come from. The same epoch gives the same batches, augmentation included, however often it is asked
    for: a resumed run sees what the uninterrupted one would have seen."""

    batches: int
    """Steps per epoch for this process."""

    images: int
    """Images per epoch over all processes."""

    def epoch(self, epoch: int, skip: int = 0, *, mixed: bool = True) -> Iterator[Batch]:
        """Batches on the training device; `skip` leaves out the first ones cheaply, and not `mixed` leaves out mixup
        and cutmix."""
        ...


class Objective:
    """What a step minimises, such as cross entropy, distillation or attention alignment."""

    teacher: "Teacher | None" = None
    """The model it learns from."""

    distance: nn.Module | None = None
    """What measures how far activations are apart. It is compiled with the blocks, for it reads them several times."""

    activations: "Sequence[Activations]" = ()
    """What it records inside the models."""

    variant: Hashable = None
    """Steps of different variants do different work, and are recorded one by one."""

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """The loss under "loss"; other entries are logged. Nothing here may wait for the device."""
        raise NotImplementedError

    def repeated(self, model: nn.Module) -> list[nn.Module]:
        """What repeats in a step, in the model or the teacher, and is therefore worth compiling by itself."""
        return [model.get_submodule(name) for name in blocks_around_hosts(model)]

    def reset(self) -> None:
        """Forget a step that was not finished."""
        for recorded in self.activations:
            recorded.take()

    def close(self) -> None:
        """Take the hooks off the models."""
        for recorded in self.activations:
            recorded.hooks.close()


class Task:
    """What training does not know of a task: how good a model is, and what a batch's tensors are."""

    best: str = ""
    """The metric by which the best weights are chosen; none where there is nothing to evaluate on."""

    larger_is_better: bool = True

    def metrics(self, model: nn.Module) -> Mapping[str, float]:
        """The metrics of a model in evaluation mode."""
        return {}

    def forward(self, model: nn.Module, batch: Batch) -> Any:
        """What the model makes of a batch."""
        return model(images_of(batch)[0])

    def resize(self, batch: Batch, size: int) -> Batch:
        """The batch with its images at another size. A task whose boxes or masks follow the image says how."""
        others = {id(image): image for image in images_of(batch) if image.shape[-1] != size}
        resized = {name: F.interpolate(image, size, mode="bicubic", antialias=True) for name, image in others.items()}
        return trees.tree_map(lambda leaf: resized.get(id(leaf), leaf), batch)


def images_of(batch: Batch) -> list[Tensor]:
    """The images in a batch: floating point tensors of (batch, channels, height, width)."""
    return [leaf for leaf in tensors_of(batch) if leaf.ndim == 4 and leaf.is_floating_point()]


def tensors_of(tree: Any) -> list[Tensor]:
    """All tensors in a tree."""
    return [leaf for leaf in trees.tree_leaves(tree) if isinstance(leaf, Tensor)]


def blocks_around_hosts(model: nn.Module) -> list[str]:
    """The blocks around the attention layers, by name."""
    return [name for name in dict.fromkeys(name.rpartition(".")[0] for name, _ in find_hosts(model)) if name]
