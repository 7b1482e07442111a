"""The training loop: stages of steps, on one device or many, that can be killed at any step and go on.

A step's randomness is drawn from a seed made of the run's seed, the step and the process, and the data promise the same
batches for the same epoch. So the weights after a step do not depend on where the run was begun again. Losses stay on
the device: the loop waits for it when it logs, evaluates or writes a checkpoint, not otherwise.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, count, islice
from typing import Any

import torch
from torch import Tensor, nn

from linvit.errors import LinvitError
from linvit.training.callbacks import Position, make_callbacks
from linvit.training.checkpoints import Output, Restored, RunState, all_finite, restore_optimiser
from linvit.training.config import Config, Stage
from linvit.training.contract import Batch, BatchSource, Objective, Task, images_of, tensors_of
from linvit.training.engine.phases import Phase, repeatable, without_cudnn_attention
from linvit.training.engine.step import Meters, Stepper
from linvit.training.engine.stopping import Stop, Stopped
from linvit.training.logs import Log
from linvit.training.optimisation import stage_schedule
from linvit.training.processes import Processes

TICK = 0.25  # seconds between two words to `watch` on where a run is
LOSSES = {  # what a stage's loss is, for whoever sees it jump when the stage changes
    "alignment": "how far converted layers are from their originals",
    "features": "how far the outputs of the blocks are from the teacher's",
    "final": "how far the final features are from the teacher's",
    "supervised": "that of the model's answers, by labels, teacher or both",
}


@dataclass
class Outcome:
    """How a run ended. The speed is the median over the log lines, without the first, which warms up."""

    steps: int
    seconds: float
    images_per_second: float | None = None
    last: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)


class Diverged(LinvitError):
    """The loss is NaN or infinite. The message says where it began and what to go back to."""


class Engine:
    """Trains one model through its phases. The task says how good a model is, callbacks do what only some recipes
    need."""

    def __init__(
        self,
        processes: Processes,
        model: nn.Module,
        config: Config,
        source: BatchSource,
        phases: Sequence[Phase],
        *,
        task: Task | None = None,
        output: Output | None = None,
    ) -> None:
        if source.batches < 1:
            raise LinvitError(f"an epoch has no full batch of {config.batch_size} images: set a smaller batch_size")
        self.processes, self.config, self.source, self.phases = processes, config, source, list(phases)
        self.task, self.output = task or Task(), output or Output()
        self.model = model.to(processes.device)
        processes.broadcast(self.model.state_dict().values())
        self.epoch_steps = source.batches / config.accumulate
        self.ends = list(accumulate(max(1, round(phase.stage.epochs * self.epoch_steps)) for phase in phases))
        self.step, self.steps = 0, self.ends[-1]
        self.callbacks = make_callbacks(config, self.model, processes, source, self.task, self.steps)
        self.meters = Meters(processes, config)
        self.state = RunState(processes, config, self.model, self.callbacks, self.output)
        self.before = ""  # in words, how it was when it was logged last
        self.stop, self.ticked = Stop(), 0.0

    def run(self, *, resume: bool = False) -> Outcome:
        """Train to the end. With `resume`, go on from the newest usable checkpoint, if there is one."""
        if self.state.begun and not resume:
            raise LinvitError(f"{self.output.folder} holds a run: --resume goes on with it, or give another folder")
        notes: list[str] = []
        restored = self.state.restore(notes.append) if resume else None
        metrics: dict[str, float] = {}
        if restored is not None:
            known = restored[1]
            self.step, self.meters.seconds = known["step"], known["seconds"]
            metrics = known["metrics"] if self.step == self.steps else {}  # of a run that was finished
            notes.append(f"resumed after step {self.step} of {self.steps}")
        began = time.perf_counter()
        learning = {parameter: parameter.requires_grad for parameter in self.model.parameters()}
        output = self.output if self.processes.first else Output()
        self.log = Log(output.folder, output.watch, after=self.step if restored is not None else -1)
        try:
            for text in notes:
                self.note(text)
            self.stepper = Stepper(self.processes, self.model, self.config, self.meters, self.note)
            batches = self.batches(self.step)
            kept = self.output.folder is not None
            with self.stop.heard(kept), without_cudnn_attention(), repeatable(self.config.deterministic):
                if restored is None:
                    self.evaluate()  # what conversion left, before anything is learnt
                elif restored[1].get("unevaluated"):
                    metrics = self.evaluate()
                for phase, start, end in zip(self.phases, [0, *self.ends[:-1]], self.ends, strict=True):
                    if self.step < end:
                        metrics = self.run_stage(phase, start, end, batches, restored)
                        restored = None
                metrics = metrics or self.evaluate()
            if self.output.models:
                self.state.save_models()
        finally:
            self.log.close()
            for callback in self.callbacks:
                callback.close()
            for phase in self.phases:
                phase.objective.reset()  # a step that failed leaves it half done
            for parameter, learnt in learning.items():
                parameter.requires_grad_(learnt)
        best = self.state.best[1] if self.state.best is not None else None
        shown = {**best["metrics"], "step": best["step"]} if best is not None else {}
        return Outcome(self.step, round(time.perf_counter() - began, 2), self.meters.speed, metrics, shown)

    def run_stage(self, phase: Phase, start: int, end: int, batches: Iterator[Batch], restored: Restored | None) -> Any:
        """The rest of a stage, which goes from step `start` to `end`; the metrics at its end."""
        config, stepper, meters = self.config, self.stepper, self.meters
        schedule = stage_schedule(config, phase.stage, end - start, self.epoch_steps)
        at = Position(phase.stage, self.step, start, end, schedule.warmup)
        stepper.begin_stage(phase.stage)
        self.note_stage(phase.stage)
        meters.begin()
        if phase.prepare is not None and self.step == start:
            phase.prepare(self.source.epoch(0))
            self.processes.broadcast(self.model.parameters())
        if restored is not None and self.step > start:
            restore_optimiser(stepper.optimiser, restored)
        objective = phase.objective
        for callback in self.callbacks:
            callback.before_stage(at)
            objective = callback.wrap(objective, at)
        stepper.minimise(phase.step(objective, self.model, config, self.processes.device))
        every = max(1, round(config.eval_epochs * self.epoch_steps))
        metrics: dict[str, float] = {}
        self.model.train()
        meters.good.fill_(self.step)
        meters.stop_clock()
        meters.begin()
        while self.step < end:
            lr = schedule(self.step - start)
            stepper.seed(self.step)
            for callback in self.callbacks:
                callback.before_step(at)
            stepper.take(self.step, lr, self.changed(batches, self.step), objective.variant)
            at.step = self.step = self.step + 1
            for callback in self.callbacks:
                callback.after_step(at)
            ended, measured = self.step == end, self.step == end or self.step % every == 0
            logged = measured or self.step % config.log_steps == 0
            if logged:
                self.write_log(at, lr, objective)
            else:
                self.tick(at)
            if ended and not all_finite(self.model):
                self.stop_diverged(self.step - 1, objective)
            if measured:
                try:
                    metrics = self.evaluate()
                except Stopped:
                    self.save({"metrics": {}, "unevaluated": True})
                    raise
            asked = self.asked(logged)
            if asked is not None or self.state.due() or (self.step == self.steps and self.output.models):
                meters.stop_clock()
                self.save({"metrics": metrics if measured else {}})
                meters.start_clock()
            if asked is not None and self.step < self.steps:
                raise Stopped(asked)
        return metrics

    def asked(self, logged: bool) -> int | None:
        """The signal that told the run to stop, if one did. Processes agree on it where they meet anyway."""
        if self.processes.world == 1:
            return self.stop.asked
        return next(filter(None, self.processes.gather_objects(self.stop.asked)), None) if logged else None

    def save(self, known: dict[str, Any]) -> None:
        """Write a checkpoint."""
        known = {"seconds": self.meters.seconds, **known}
        self.state.save(self.step, self.stepper.optimiser, self.meters.bad, known)

    def batches(self, step: int) -> Iterator[Batch]:
        """The batches of all epochs in a row, from a step on."""
        first, skip = divmod(step * self.config.accumulate, self.source.batches)
        for epoch in count(first):
            yield from self.source.epoch(epoch, skip if epoch == first else 0)

    def changed(self, batches: Iterator[Batch], step: int) -> Iterator[Batch]:
        """A step's batches, as the callbacks want them."""
        for batch in islice(batches, self.config.accumulate):
            for callback in self.callbacks:
                batch = callback.change_batch(batch, step)
            yield batch

    def evaluate(self) -> dict[str, float]:
        """The task's metrics of the shown weights, which are kept if they are the best."""
        if not self.task.best:
            return {}
        shown = self.state.shown
        for callback in self.callbacks:
            callback.before_evaluation(shown)
        self.processes.broadcast(shown.buffers())
        shown.eval()
        with self.stop.interruptible(), torch.no_grad(), self.processes.autocast():
            metrics = dict(self.task.metrics(shown))
        self.model.train()
        if self.task.best not in metrics:
            raise LinvitError(f"evaluation gave {', '.join(metrics) or 'nothing'}: it must give {self.task.best}")
        score = metrics[self.task.best]
        self.state.offer(self.step, score if self.task.larger_is_better else -score, metrics)
        self.log.add("eval", self.step, {**self.so_far(), **metrics})
        self.meters.begin()
        return metrics

    def note(self, text: str) -> None:
        self.log.add("note", self.step, {"text": text})

    def note_stage(self, stage: Stage) -> None:
        """Say which of several stages begins, and what its loss is: the numbers of two stages are not of one kind."""
        stages = [phase.stage for phase in self.phases]
        if len(stages) > 1:
            number = next(index for index, each in enumerate(stages, start=1) if each is stage)
            other = number > 1 and stages[number - 2].objective != stage.objective
            jumps = f"; it is not to be compared with that of {stages[number - 2].name}" if other else ""
            measure = LOSSES.get(stage.objective, stage.objective)
            self.note(f"stage {number} of {len(stages)}, {stage.name}: the loss is {measure}{jumps}")

    def where(self, at: Position, speed: float | None) -> dict[str, Any]:
        """Where the run is, and how long the rest takes at this speed, evaluations not counted."""
        left = (self.steps - self.step) * self.config.batch_size / speed if speed else None
        whole = {"steps": self.steps, "epochs": round(self.steps / self.epoch_steps, 4)}
        return {"stage": at.stage.name, **self.so_far(), **whole, "images_per_second": speed, "seconds_left": left}

    def tick(self, at: Position) -> None:
        """Now and then let `watch` know where the run is, between two lines of the log."""
        if self.log.watch is None or not self.output.models or time.monotonic() - self.ticked < TICK:
            return
        values = self.meters.peek()
        self.log.watch({"kind": "step", "step": self.step, **self.where(at, self.meters.rate()), **values})
        self.ticked = time.monotonic()

    def so_far(self) -> dict[str, float]:
        """Epochs and seconds of training, without evaluations and checkpoints."""
        return {"epoch": round(self.step / self.epoch_steps, 4), "seconds": round(self.meters.seconds, 3)}

    def write_log(self, at: Position, lr: float, objective: Objective) -> None:
        """Fetch the meters in one go, stop if a loss was not finite, and log."""
        values, bad = self.meters.read()
        if bad is not None:
            self.stop_diverged(bad, objective)
        self.meters.stop_clock()
        self.before = f"before, the loss was {values['loss']:.3g}, the gradient's norm {values['gradient_norm']:.3g}; "
        record = {**self.where(at, self.meters.images_per_second()), **values, "lr": lr}
        for callback in self.callbacks:
            record |= callback.log(self.step)
        self.log.add("train", self.step, record)
        self.meters.begin()

    def stop_diverged(self, step: int, objective: Objective) -> None:
        """Run the batch of the bad step again to find the layer, and say what is left."""
        self.stepper.seed(step)
        where = None
        for batch in self.changed(self.batches(step), step):
            with self.processes.autocast():
                where = where or find_bad_layer(self.model, objective, batch)
        where = next(filter(None, self.processes.gather_objects(where)), None)  # it may be another process's batch
        files = self.state.files.files() if self.state.files else []
        left = f"the last good checkpoint is {files[0]}" if files else "there was no checkpoint yet"
        began = f"it began in {where}" if where else "the step went well when it was run again"
        message = f"the loss is NaN or infinite in step {step + 1}: {began}; {self.before}{left}"
        self.log.add("note", self.step, {"text": message}, shown=False)
        raise Diverged(f"{message}; a lower lr, a clip_norm or precision=fp32 may help")


def find_bad_layer(model: nn.Module, objective: Objective, batch: Batch) -> str | None:
    """The first place, in words, where this batch meets something that is not finite; None where there is none. The
    batch is run again with an eye on every layer."""
    if not all(map(finite, tensors_of(batch))):
        return "the batch itself"
    for module in model.modules():  # a bad batch has spoilt its statistics, which training does not read
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not all(map(finite, module.buffers())):
            module.reset_running_stats()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not finite(tensor):
            return f"the weights, beginning with {name}"
    asked = objective.teacher
    if asked is not None and not all(map(finite, tensors_of(asked.output(images_of(batch)[0])))):
        return "the teacher's answers"
    found: list[str] = []

    def look(name: str, module: nn.Module, args: Any, out: Any) -> None:
        if not found and not all(map(finite, tensors_of(out))):
            found.append(f"the activations of {name or 'the model'} ({type(module).__name__})")

    with ExitStack() as hooks:
        hooks.callback(model.zero_grad)
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_hook(partial(look, name)))
        loss = objective(model, batch)["loss"]
        if found:
            return found[0]
        if not finite(loss):
            return "the loss itself, while every layer's activations are finite"
        model.zero_grad()
        loss.backward()
        wrong = [name for name, p in model.named_parameters() if p.grad is not None and not finite(p.grad)]
        return f"the gradient of {wrong[-1]}" if wrong else None


def finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all()) if tensor.is_floating_point() else True
