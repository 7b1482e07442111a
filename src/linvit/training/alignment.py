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

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from linvit.attention import TokenGrid
from linvit.conversion.convert import current_mechanism, find_hosts
from linvit.conversion.host import Host
from linvit.errors import LinvitError, unknown
from linvit.training.distillation import Distance, Teacher, check_teacher, divergence
from linvit.training.losses import logits_of
from linvit.training.taps import Call, Taps, detached, main

INPUTS = ("teacher", "student")


def hosts_to_align(teacher: nn.Module, student: nn.Module) -> list[str]:
    """The attention layers in which the student differs from its teacher, by name; all of them if it differs in none,
    as an original does that is trained beside its conversions. The two must be one architecture."""
    theirs = dict(find_hosts(teacher))
    ours = dict(find_hosts(student))
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
        self.model = model
        self.modules = {name: model.get_submodule(name) for name in names}
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

        def see(name: str, host: Any) -> Any:
            return lambda module, args: found.__setitem__(name, host.grids.grid if host.grids is not None else None)

        hosts = [(name, module) for name, module in self.modules.items() if isinstance(module, Host)]
        handles = [module.register_forward_pre_hook(see(name, module)) for name, module in hosts]
        modes = {module: module.training for module in self.model.modules()}
        try:
            with torch.no_grad():
                self.model.eval()(image.to(next(self.model.parameters()).dtype))
        finally:
            for module, training in modes.items():
                module.training = training
            for handle in handles:
                handle.remove()
        self.grids[tuple(image.shape[-2:])] = found

    def call(self, name: str, call: Call, images: Tensor) -> Tensor:
        """One layer's output for these arguments."""
        module = self.modules[name]
        if isinstance(module, Host) and module.grids is not None:
            module.grids.grid = self.grids[tuple(images.shape[-2:])][name]
        return main(module(*call[0], **call[1]))


class AttentionAlignment:
    """The objective. It holds the student's layers, so it is made for one student; gradients reach these alone."""

    def __init__(self, teacher: Teacher, student: nn.Module, *, inputs: str = "teacher") -> None:
        if inputs not in INPUTS:
            raise unknown("kind of inputs", inputs, INPUTS)
        self.teacher, self.inputs, self.distance = teacher, inputs, Distance()
        self.names = hosts_to_align(teacher.model, student)
        self.originals, self.layers = Layers(teacher.model, self.names), Layers(student, self.names)
        source = teacher.model if inputs == "teacher" else student
        self.taps = Taps(source, self.names, cut=inputs == "student")

    def rest(self) -> None:
        """Listen to neither model any more, whatever happened."""
        self.taps.take()

    def close(self) -> None:
        """Take the hooks off both models."""
        self.taps.close()

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        errors = torch.stack(list(self.errors(model, images).values()))
        return {"loss": errors.mean(), "worst": errors.max().detach()}

    def errors(self, model: nn.Module, images: Tensor) -> dict[str, Tensor]:
        """The relative error of each layer: 0 is its original, 1 no better than the mean."""
        if self.inputs == "teacher":
            self.layers.ready(images)
            self.taps.listen()
            self.teacher(images)
            calls, wanted = self.taps.take()
            ours = {name: self.layers.call(name, calls[name], images) for name in self.names}
        else:
            self.originals.ready(images)
            self.taps.listen()
            model(images)
            calls, ours = self.taps.take()
            with torch.no_grad(), self.teacher.arithmetic(images):
                wanted = {name: self.answer(name, calls[name], images) for name in self.names}
        return {name: self.distance(ours[name], wanted[name].detach()) for name in self.names}

    def answer(self, name: str, call: Call, images: Tensor) -> Tensor:
        """The original's output for what the student's layer saw."""
        return self.originals.call(name, (like(call[0], self.teacher.dtype), like(call[1], self.teacher.dtype)), images)


def like(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors in the teacher's precision."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        return type(value)(like(item, dtype) for item in value)
    return {key: like(item, dtype) for key, item in value.items()} if isinstance(value, dict) else value


def blocks_around_hosts(model: nn.Module) -> list[str]:
    """The blocks whose outputs are compared, by name."""
    return [name for name in dict.fromkeys(name.rpartition(".")[0] for name, _ in find_hosts(model)) if name]


class FeatureAlignment:
    """The objective: the outputs of the blocks around the attention layers, and with a weight the logits, as KL
    divergence."""

    def __init__(self, teacher: Teacher, student: nn.Module, *, logits: float = 0.0, temperature: float = 1.0) -> None:
        self.teacher, self.logits, self.temperature = teacher, logits, temperature
        self.distance = Distance()
        if logits:
            check_teacher(teacher.model, student)
        hosts_to_align(teacher.model, student)
        self.names = blocks_around_hosts(student)
        self.ours, self.theirs = Taps(student, self.names), Taps(teacher.model, self.names)

    def rest(self) -> None:
        """Listen to neither model any more, whatever happened."""
        self.ours.take()
        self.theirs.take()

    def close(self) -> None:
        """Take the hooks off both models."""
        self.ours.close()
        self.theirs.close()

    def __call__(self, model: nn.Module, images: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        self.theirs.listen()
        wanted = self.teacher(images)
        self.ours.listen()
        output = model(images)
        seen, shown = self.ours.take()[1], self.theirs.take()[1]
        errors = torch.stack([self.distance(seen[name], detached(shown[name])) for name in self.names])
        loss, entries = errors.mean(), {"worst": errors.max().detach(), "features": errors.mean().detach()}
        if self.logits:
            apart = divergence(logits_of(output), wanted, self.temperature)
            loss, entries["distillation"] = loss + self.logits * apart, apart.detach()
        return {"loss": loss, **entries}
