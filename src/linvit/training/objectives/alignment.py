"""Alignment: a converted model learns from its original without labels, layer by layer first, then as a whole.

*Attention alignment*. Each converted layer learns to give what its original gives on the same input, all layers at
once: twelve small regressions in parallel, with no gradient between layers. On the teacher's inputs one pass of the
teacher serves all of them. On the student's own inputs, where errors of earlier layers have moved the stream, the
student's pass serves, and each original answers for what its layer really sees.

There is no extra scale or bias for the feature map to learn: q and k come from a linear layer with a bias, so a scale
per head and a shift of q and k are already among its weights, and nothing need be folded back afterwards.

*Feature alignment*. The outputs of whole blocks, the residual stream itself, are matched, with gradients through the
entire student: later blocks learn to make up for earlier ones.
"""

from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention import TokenGrid
from linvit.conversion.convert import current_mechanism, find_hosts
from linvit.conversion.host import Host
from linvit.errors import LinvitError, unknown
from linvit.measurement.macs import evaluating
from linvit.training.config import CHOICES
from linvit.training.contract import Batch, Objective, blocks_around_hosts, images_of
from linvit.training.objectives.distillation import Compared, Distance, divergence
from linvit.training.objectives.teacher import Activations, Teacher, check_teacher, first_tensor, logits_of, map_tensors


def hosts_to_align(teacher: nn.Module, student: nn.Module) -> list[str]:
    """The attention layers in which the student differs from its teacher, by name; all of them if it differs in none,
    as an original does that is trained beside its conversions. The two must be one architecture."""
    theirs, ours = dict(find_hosts(teacher)), dict(find_hosts(student))
    if not ours or ours.keys() != theirs.keys():
        odd = sorted(ours.keys() ^ theirs.keys())
        which = f"'{odd[0]}' is not in both" if odd else "there are none"
        raise LinvitError(f"teacher and student must have the same attention layers to align them: {which}")
    changed = [name for name, host in ours.items() if current_mechanism(host) != current_mechanism(theirs[name])]
    return changed or list(ours)


class Layers:
    """Attention layers that can be called on their own. Some look up the grid of the image now passing through the
    model; it is noted in one pass of the model for each image size."""

    def __init__(self, model: nn.Module, names: list[str]) -> None:
        self.model, self.modules = model, {name: model.get_submodule(name) for name in names}
        self.grids: dict[tuple[int, ...], dict[str, TokenGrid | None]] = {}
        self.looks_up = any(isinstance(m, Host) and m.grids is not None for m in self.modules.values())
        embed: Any = getattr(model, "patch_embed", None)
        if self.looks_up and getattr(embed, "img_size", None) and isinstance(getattr(embed, "proj", None), nn.Conv2d):
            like = next(model.parameters())  # the likely size at once: noting it later breaks a compiled step in two
            self.note(torch.zeros(1, embed.proj.in_channels, *embed.img_size, device=like.device))

    def ready(self, images: Tensor) -> None:
        if self.looks_up and tuple(images.shape[-2:]) not in self.grids:
            self.note(images[:1])

    @torch.compiler.disable
    def note(self, image: Tensor) -> None:
        found: dict[str, TokenGrid | None] = {}

        def see(name: str, host: Any, args: Any) -> None:
            found[name] = host.grids.grid if host.grids is not None else None

        with ExitStack() as hooks, evaluating(self.model), torch.no_grad():
            for name, module in self.modules.items():
                if isinstance(module, Host):
                    hooks.enter_context(module.register_forward_pre_hook(partial(see, name)))
            self.model(image.to(next(self.model.parameters()).dtype))
        self.grids[tuple(image.shape[-2:])] = found

    def call(self, name: str, call: tuple[Any, Any], images: Tensor) -> Tensor:
        """One layer's output for these arguments."""
        module = self.modules[name]
        if isinstance(module, Host) and module.grids is not None:
            module.grids.grid = self.grids[tuple(images.shape[-2:])][name]
        return first_tensor(module(*call[0], **call[1]))


class AttentionAlignment(Objective):
    """The objective. It holds the student's layers, so it is made for one student; gradients reach these alone."""

    teacher: Teacher
    distance: Distance

    def __init__(self, teacher: Teacher, student: nn.Module, *, inputs: str = "teacher") -> None:
        if inputs not in CHOICES["inputs"]:
            raise unknown("kind of inputs", inputs, CHOICES["inputs"])
        self.teacher, self.inputs, self.distance = teacher, inputs, Distance()
        self.names = hosts_to_align(teacher.model, student)
        self.originals, self.layers = Layers(teacher.model, self.names), Layers(student, self.names)
        source = teacher.model if inputs == "teacher" else student
        self.activations = [Activations(source, self.names, self.names, cut=inputs == "student")]

    def repeated(self, model: nn.Module) -> list[nn.Module]:
        """The attention layers, which are called by themselves."""
        return [module for _, module in find_hosts(model)]

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        errors = torch.stack(list(self.errors(model, images_of(batch)[0]).values()))
        return {"loss": errors.mean(), "worst": errors.max().detach()}

    def errors(self, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """The relative error of each layer: 0 is its original, 1 no better than the mean."""
        (activations,), on_teacher = self.activations, self.inputs == "teacher"
        (self.layers if on_teacher else self.originals).ready(images)
        activations.record()
        if on_teacher:
            self.teacher.output(images)
            calls, wanted = activations.take()
            ours = {name: self.layers.call(name, calls[name], images) for name in self.names}
        else:
            model(images)
            calls, ours = activations.take()
            with torch.no_grad(), self.teacher.arithmetic(images):
                calls = map_tensors(lambda t: t.to(self.teacher.dtype) if t.is_floating_point() else t, calls)
                wanted = {name: self.originals.call(name, calls[name], images) for name in self.names}
        return {name: self.distance(ours[name], wanted[name].detach()) for name in self.names}


class FeatureAlignment(Compared):
    """The objective: the outputs of the blocks around the attention layers, and with a weight the logits, as KL
    divergence."""

    def __init__(self, teacher: Teacher, student: nn.Module, *, logits: float = 0.0, temperature: float = 1.0) -> None:
        self.logits, self.temperature = logits, temperature
        if logits:
            check_teacher(teacher.model, student)
        hosts_to_align(teacher.model, student)
        super().__init__(teacher, student, {name: name for name in blocks_around_hosts(student)})

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        output, wanted, errors = self.ask(model, images_of(batch)[0])
        assert errors is not None
        loss, entries = errors.mean(), {"worst": errors.max().detach(), "features": errors.mean().detach()}
        if self.logits:
            apart = divergence(logits_of(output), logits_of(wanted).float(), self.temperature)
            loss, entries["distillation"] = loss + self.logits * apart, apart.detach()
        return {"loss": loss, **entries}
