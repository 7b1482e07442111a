"""The model that a student learns from, and activations inside either of the two, recorded by hooks that are idle
otherwise.

Hooks are set when an objective is made and not in its call, which may be compiled; the compiler follows hooks that are
there before it starts.
"""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from linvit.conversion.opening import open_model
from linvit.conversion.saving import label_names
from linvit.errors import LinvitError

Call = tuple[tuple[Any, ...], dict[str, Any]]


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: Hugging Face names them, distilled models in training give two and mean them."""
    output = getattr(output, "logits", output)
    if isinstance(output, tuple | list):
        return torch.stack([part for part in output if isinstance(part, Tensor)]).mean(0)
    return output


class Teacher:
    """A model that is asked and never changed. It runs in its parameters' own precision, or in `precision` by autocast,
    which saves time where the student trains in half precision anyway. Images come normalised for the `student`; where
    the teacher knows other colour statistics, they are changed to those."""

    def __init__(
        self, model: nn.Module, *, student: nn.Module | None = None, precision: torch.dtype | None = None
    ) -> None:
        self.model, self.precision = model.eval().requires_grad_(False), precision
        self.dtype = next(model.parameters()).dtype
        self.colours = None if student is None else other_colours(student, model)

    def __call__(self, images: Tensor) -> Tensor:
        """The logits."""
        return logits_of(self.output(images)).float()

    def output(self, images: Tensor, call: Callable[[Tensor], Any] | None = None) -> Any:
        """What the model gives, or what `call` asks of it."""
        if self.colours is not None:
            scale, shift = self.colours
            images = images * scale.to(images.dtype) + shift.to(images.dtype)
        with torch.no_grad(), self.arithmetic(images):
            return (call or self.model)(images.to(self.dtype))

    def arithmetic(self, like: Tensor) -> AbstractContextManager[Any]:
        lowered = self.precision is not None and self.precision != self.dtype
        return torch.autocast(like.device.type, dtype=self.precision if lowered else None, enabled=lowered)


def other_colours(student: nn.Module, teacher: nn.Module) -> tuple[Tensor, ...] | None:
    """What takes images from the student's colour statistics to the teacher's, a factor and a summand for each channel;
    none where they are the same, as far as timm knows."""
    first = next((module for module in student.modules() if isinstance(module, nn.Conv2d)), None)
    pairs = []
    for known in (timm.data.resolve_model_data_config(model) for model in (student, teacher)):
        colours = torch.tensor([known["mean"], known["std"]])
        channels = first.in_channels if first is not None else colours.shape[1]
        pairs.append(colours if channels == colours.shape[1] else colours.mean(1, keepdim=True).expand(-1, channels))
    if torch.equal(*pairs):
        return None
    (our_mean, our_std), (their_mean, their_std) = pairs
    scale, shift = our_std / their_std, (our_mean - their_mean) / their_std
    device = next(teacher.parameters()).device
    return tuple(value.view(-1, 1, 1).to(device) for value in (scale, shift))


def open_teacher(source: str | Path, *, pretrained: bool = True, **args: Any) -> nn.Module:
    """A teacher by name: a folder that `linvit.save` wrote, or a timm model, pretrained."""
    instead = "the folder of a saved one"
    return open_model(str(source), pretrained=pretrained, args=args, what="teacher", instead=instead)


def check_teacher(teacher: nn.Module, student: nn.Module) -> None:
    """Whether both speak of the same classes, as far as they say how many and which."""
    theirs, ours = (getattr(model, "num_classes", None) for model in (teacher, student))
    if theirs and ours and theirs != ours:
        raise LinvitError(f"the teacher has {theirs} classes, the student {ours}: choose a teacher of the same classes")
    for place, names in enumerate(zip(label_names(teacher), label_names(student), strict=False)):
        if len({*names}) > 1 and all(names):
            raise LinvitError(
                f"output {place} is {names[0]} to the teacher and {names[1]} to the student: "
                "choose a teacher that was trained on the same classes"
            )


def check_logits(heard: Tensor, wanted: Tensor) -> None:
    """The number of classes again, where the models did not say it."""
    if heard.shape[-1] != wanted.shape[-1]:
        classes = f"{wanted.shape[-1]} classes, the student {heard.shape[-1]}"
        raise LinvitError(f"the teacher has {classes}: choose a teacher of the same classes")


class Activations:
    """The calls and outputs of named modules between `record` and `take`; of a `whole` output all, else its first
    tensor. With `cut`, gradients stop at both ends of a
    module: it learns from its own output alone, and the model goes on as if nothing were learnt."""

    def __init__(
        self,
        model: nn.Module,
        calls: Collection[str] = (),
        outputs: Collection[str] = (),
        *,
        cut: bool = False,
        whole: bool = False,
    ) -> None:
        self.cut, self.whole, self.recording, self.hooks = cut, whole, False, ExitStack()
        self.calls: dict[str, Call] = {}
        self.outputs: dict[str, Any] = {}
        modules = dict(model.named_modules())
        for name in (*calls, *outputs):
            if name not in modules:
                raise LinvitError(f"{type(model).__name__} has no module '{name}'")
        for name in calls:
            hook = modules[name].register_forward_pre_hook(partial(self.before, name), with_kwargs=True)
            self.hooks.enter_context(hook)
        for name in outputs:
            self.hooks.enter_context(modules[name].register_forward_hook(partial(self.after, name)))

    def before(self, name: str, module: nn.Module, args: Any, named: dict[str, Any]) -> Call | None:
        if not self.recording:
            return None
        self.calls[name] = map_tensors(Tensor.detach, (args, named))
        return self.calls[name] if self.cut else None

    def after(self, name: str, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.recording:
            return None
        self.outputs[name] = output if self.whole else first_tensor(output)
        return map_tensors(Tensor.detach, output) if self.cut else None

    def record(self) -> None:
        self.recording = True

    def take(self) -> tuple[dict[str, Call], dict[str, Any]]:
        """What was recorded; nothing of it is kept."""
        self.recording = False
        calls, outputs = self.calls, self.outputs
        self.calls, self.outputs = {}, {}
        return calls, outputs


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """The same containers with each tensor mapped. In plain words, which the compiler follows."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(function, item) for item in tree)
    return {key: map_tensors(function, item) for key, item in tree.items()} if isinstance(tree, dict) else tree


def first_tensor(output: Any) -> Tensor:
    """The tensor in a module's output: some modules give more beside it, a size say."""
    while isinstance(output, tuple | list):
        output = output[0]
    return output
