"""The hooks of the training loop, and what only some recipes need: the moving average, MESA, Castling's masks, growing
drop path, image sizes by turns, BatchNorm measured again."""

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from linvit.attention.castling import Castling
from linvit.measurement.macs import evaluating
from linvit.training.config import Config, Stage
from linvit.training.contract import Batch, BatchSource, Objective, Task
from linvit.training.drop_path import RampedDropPath
from linvit.training.objectives.teacher import first_tensor, logits_of
from linvit.training.processes import Processes


@dataclass
class Position:
    """Where a run is: `step` steps are done; the stage goes from step `start` to `end`, and begins with a warm-up."""

    stage: Stage
    step: int
    start: int
    end: int
    warmup: int = 0

    @property
    def progress(self) -> float:
        """The share of the stage after its warm-up that is over; negative during the warm-up."""
        return (self.step - self.start - self.warmup) / max(1, self.end - self.start - self.warmup)


class Callback:
    """Called at fixed points of the loop; what a callback does not need does nothing. Of a step in the making `step`
    counts the steps before it, after a step that one as well."""

    shown: nn.Module | None = None
    """A model to evaluate and save in place of the one in training."""

    def before_stage(self, at: Position) -> None:
        """A stage begins, or goes on from a checkpoint."""

    def wrap(self, objective: Objective, at: Position) -> Objective:
        """What a stage minimises, with what is added to it."""
        return objective

    def before_step(self, at: Position) -> None: ...

    def change_batch(self, batch: Batch, step: int) -> Batch:
        return batch

    def after_step(self, at: Position) -> None: ...

    def before_evaluation(self, model: nn.Module) -> None:
        """The shown model is going to be evaluated."""

    def log(self, step: int) -> dict[str, Any]:
        """Entries for the next log line."""
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of this callback: tensors under names of their own, and `state` for plain data."""
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Take back what is in a checkpoint."""

    def close(self) -> None:
        """The run is over, or has failed."""


def under(prefix: str, entries: Mapping[str, Any]) -> dict[str, Any]:
    """A checkpoint's entries whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): entry for name, entry in entries.items() if name.startswith(prefix)}


class Average(Callback):
    """The moving average (EMA): a copy of the model whose weights, and BatchNorm's statistics with them, follow the
    trained ones slowly. It is a model of its own, so that it can be evaluated, saved and learnt from without touching
    the one in training."""

    def __init__(self, model: nn.Module, decay: float, ramp: float | None = None) -> None:
        self.decay, self.ramp = decay, ramp
        self.model = self.shown = copy.deepcopy(model).eval().requires_grad_(False)
        averaged = {name for name, value in model.state_dict().items() if value.is_floating_point()}
        self._weights: list[list[Tensor]] = [[], []]
        self._buffers: list[list[Tensor]] = [[], []]  # counts, and what is only for the moment
        for side, module in enumerate((self.model, model)):
            self._weights[side] += module.parameters()
            for name, buffer in module.named_buffers():
                (self._weights if name in averaged else self._buffers)[side].append(buffer)

    def decay_at(self, step: int) -> float:
        """The decay after so many steps, near 0 at first where there is a ramp. Without one, a training that is short
        for its decay would show the weights it began with."""
        if self.ramp is None:
            return min(self.decay, (1 + step) / (10 + step))
        return self.decay * (1 - math.exp(-step / self.ramp)) if self.ramp else self.decay

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Follow the model; `step` counts from 1, and at 0 the average stands where the model stands."""
        if step:
            torch._foreach_lerp_(self._weights[0], self._weights[1], 1 - self.decay_at(step))
        else:
            torch._foreach_copy_(self._weights[0], self._weights[1])
        if self._buffers[0]:
            torch._foreach_copy_(self._buffers[0], self._buffers[1])

    def before_stage(self, at: Position) -> None:
        if at.step == at.start:
            self.update(0)

    def after_step(self, at: Position) -> None:
        self.update(at.step - at.start)

    def tensors(self) -> dict[str, Tensor]:
        return {f"average.{name}": tensor for name, tensor in self.model.state_dict().items()}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(under("average.", tensors))


class Mesa(Callback, Objective):
    """MESA, as EfficientViT trains its large models: from some step on, the model also learns what the moving average
    of its own weights says. The papers' formula is `ratio · BCE(model, sigmoid(average))`. An objective around that of
    supervised stages; its `variant` is whether its time has come."""

    hook: RemovableHandle | None = None
    output: Tensor | None = None

    def __init__(self, config: Config, model: nn.Module, average: Average, processes: Processes) -> None:
        self.config, self.model, self.average, self.processes = config, model, average, processes

    def wrap(self, objective: Objective, at: Position) -> Objective:
        self.close()
        if at.stage.objective != "supervised":
            return objective
        self.objective, self.teacher, self.distance = objective, objective.teacher, objective.distance
        self.hook = self.model.register_forward_hook(self.see)
        return self

    def see(self, model: nn.Module, args: Any, out: Any) -> None:
        """Keep the model's output, so that it need not run twice."""
        self.output = first_tensor(getattr(out, "logits", out))

    def repeated(self, model: nn.Module) -> list[nn.Module]:
        return self.objective.repeated(model)

    def __call__(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        entries = self.objective(model, batch)
        if not self.variant or self.output is None:
            return {**entries, "mesa": entries["loss"].detach() * 0}
        with torch.no_grad():
            wanted = logits_of(self.average.model(batch[0])).sigmoid()
        mesa = F.binary_cross_entropy_with_logits(self.output, wanted)
        return {**entries, "loss": entries["loss"] + self.config.mesa * mesa, "mesa": mesa.detach()}

    def before_step(self, at: Position) -> None:
        self.variant = at.progress >= self.config.mesa_start

    def after_step(self, at: Position) -> None:
        """What the average says has BatchNorm's statistics in it, which each process measures on its own images: all
        take the first one's."""
        if self.hook is not None:
            self.processes.broadcast(self.average.model.buffers())

    def close(self) -> None:
        if self.hook is not None:
            self.hook.remove()
            self.hook = self.output = None


class Masks(Callback):
    """Castling's softmax branches during training: how much of them is left, and their end.

    The paper reports that the mask empties by itself. It is annealed to nothing over the last part of the training all
    the same, so that the model which is trained is the model that is used: that changes nothing where the mask is
    empty, and a mask that looks so need not be. With 197 tokens a share of 0.001 is an entry in every fifth row, of any
    weight. Nothing here waits for the device."""

    def __init__(self, model: nn.Module, *, anneal: float, steps: int) -> None:
        found = {n: m for n, m in model.named_modules() if isinstance(m, Castling) and m.sparse}
        self.names = [name.removesuffix(".mechanism") for name in found]
        self.kept = [module.kept for module in found.values()]
        self.scales = [module.sparse_scale for module in found.values()]
        self.start, self.steps = round(steps * (1 - anneal)), steps
        self.asleep = False  # in stages that learn what the model does without the branch
        self.history: list[Tensor] = []

    def before_stage(self, at: Position) -> None:
        self.asleep = at.stage.objective != "supervised"  # alignment is to what is left for inference

    def before_step(self, at: Position) -> None:
        torch._foreach_zero_(self.scales)
        torch._foreach_add_(self.scales, self.scale(at.step))

    def scale(self, step: int) -> float:
        """A half cosine from 1 to 0 over the last part, which the last step reaches; 0 while asleep."""
        if self.asleep:
            return 0.0
        if step < self.start:
            return 1.0
        share = min(1.0, (step + 1 - self.start) / max(1, self.steps - self.start))
        return 0.5 * (1 + math.cos(math.pi * share))

    def after_step(self, at: Position) -> None:
        self.history.append(torch.stack(self.kept))  # the shares of non-zeros

    def state(self) -> dict[str, Any]:  # what was noted and not logged yet
        return {"kept": torch.stack(self.history).tolist() if self.history else []}

    def restore(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.history = [torch.tensor(row, device=self.kept[0].device) for row in state["kept"]]

    def log(self, step: int) -> dict[str, Any]:
        """The shares of the steps since the last time, `share` as (steps, layers); `step` is how many are done."""
        if not self.history:
            return {}
        taken, self.history = torch.stack(self.history).tolist(), []
        share = [[float(f"{value:.4g}") for value in row] for row in taken]
        first, scale = step - len(taken) + 1, self.scale(step - 1)
        return {"kept": {"layers": self.names, "first_step": first, "share": share, "scale": scale}}


class DropPathProgress(Callback):
    """Tells ramped drop paths how much of the training is over."""

    def __init__(self, model: nn.Module) -> None:
        self.progress = [module.progress for module in model.modules() if isinstance(module, RampedDropPath)]

    def before_step(self, at: Position) -> None:
        torch._foreach_zero_(self.progress)
        torch._foreach_add_(self.progress, min(1.0, max(0.0, at.progress)))


class RandomSizes(Callback):
    """Image sizes by turns, as EfficientViT trains: a step has images of one size, which all processes draw alike."""

    def __init__(self, config: Config, task: Task) -> None:
        self.config, self.task = config, task

    def change_batch(self, batch: Batch, step: int) -> Batch:
        draw = torch.Generator().manual_seed(self.config.seed * 1_000_003 + step)
        sizes = self.config.random_sizes
        return self.task.resize(batch, sizes[int(torch.randint(len(sizes), (), generator=draw))])


class StageSizes(Callback):
    """The image sizes that a stage goes through one after the other, each for an equal part of its steps."""

    at: Position | None = None

    def __init__(self, task: Task) -> None:
        self.task = task

    def before_stage(self, at: Position) -> None:
        self.at = at

    def change_batch(self, batch: Batch, step: int) -> Batch:
        at = self.at
        if at is None or not at.stage.sizes:
            return batch
        sizes, share = at.stage.sizes, (step - at.start) / (at.end - at.start)
        return self.task.resize(batch, sizes[int(share * len(sizes))])


class BatchNormStatistics(Callback):
    """Before an evaluation, as in EfficientViT, the running statistics become the mean over the first images of the
    training set, as they come augmented but not mixed, and over all processes. The rest of the model stays in
    evaluation mode, so nothing is dropped."""

    def __init__(self, config: Config, source: BatchSource, task: Task, processes: Processes) -> None:
        self.count = -(-config.bn_images * config.accumulate // config.batch_size)
        self.source, self.task, self.processes = source, task, processes

    @torch.no_grad()
    def before_evaluation(self, model: nn.Module) -> None:
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.track_running_stats]
        if not norms:
            return
        momenta = [norm.momentum for norm in norms]
        with evaluating(model), self.processes.autocast():
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a plain mean
                norm.train()
            for batch in islice(self.source.epoch(0, mixed=False), self.count):
                self.task.forward(model, batch)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            for statistic in (norm.running_mean, norm.running_var):
                if statistic is not None:
                    statistic.copy_(self.processes.mean(statistic))


def make_callbacks(
    config: Config, model: nn.Module, processes: Processes, source: BatchSource, task: Task, steps: int
) -> list[Callback]:
    """In the order in which they are called: MESA after the average it learns from."""
    made: list[Callback] = []
    drop_path, masks = DropPathProgress(model), Masks(model, anneal=config.sparse_anneal, steps=steps)
    made += [drop_path] if drop_path.progress else []
    made += [masks] if masks.names else []
    made += [RandomSizes(config, task)] if config.random_sizes else []
    made += [StageSizes(task)] if any(stage.sizes for stage in config.stages) else []
    if config.ema is not None:
        average = Average(model, config.ema, config.ema_ramp)
        made += [average, Mesa(config, model, average, processes)] if config.mesa else [average]
    return [*made, BatchNormStatistics(config, source, task, processes)] if config.bn_images else made
