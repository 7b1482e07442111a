"""The training loop: stages of steps, on one device or many, that can be killed at any step and go on.

A step's randomness is drawn from a seed made of the run's seed, the step and the process, and the data promise the same
batches for the same epoch. So the weights after a step do not depend on where the run was begun again. Losses stay on
the device: the loop waits for it when it logs, evaluates or writes a checkpoint, not otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn

from linvit.conversion.rebuilding import layers_of
from linvit.errors import LinvitError
from linvit.training.average import Average, measure_batch_norm
from linvit.training.capture import Capture, captures
from linvit.training.checkpoints import fingerprint
from linvit.training.config import Config, Stage
from linvit.training.contract import BatchSource, Objective
from linvit.training.diagnosis import Diverged, find_bad_layer
from linvit.training.drop_path import RampedDropPath, set_progress
from linvit.training.keeping import Keeper, Restored, all_finite
from linvit.training.logs import Log, cut_log
from linvit.training.masks import Masks
from linvit.training.mesa import Mesa
from linvit.training.optimiser import clip, make_optimiser, select_trainable
from linvit.training.phases import Phase, Step
from linvit.training.processes import average_gradients, share_from_first
from linvit.training.repeating import repeatable, strictly, undetermined, without_cudnn_attention
from linvit.training.schedule import stage_schedule
from linvit.training.sizes import resized
from linvit.training.window import Window

SCORES = ("top1", "agreement")  # what the best weights are best in: the first that is measured
FREE = ("log_steps", "checkpoint_seconds")  # settings that a resumed run may change


@dataclass
class Outcome:
    """How a run ended. The speed is the median over the logged windows, without the first, which warms up."""

    steps: int
    seconds: float
    images_per_second: float | None = None
    last: dict[str, float] = field(default_factory=dict)
    best: dict[str, float] = field(default_factory=dict)


class Engine:
    """Trains one model. `evaluate` gives metrics of a model, of which "top1" chooses the best, or "agreement" with the
    teacher where there are no labels; with a `folder` the run is logged, kept in checkpoints and ends in the folders
    `last` and `best`, unless `models` says that nobody wants these. `identity` says what else the run is, its data and
    teacher say, so that no other run goes on with its checkpoints."""

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        config: Config,
        source: BatchSource,
        phases: Sequence[Phase],
        *,
        folder: Path | None = None,
        evaluate: Callable[[nn.Module], Mapping[str, float]] | None = None,
        watch: Callable[[dict[str, Any]], None] | None = None,
        identity: Mapping[str, Any] | None = None,
        models: bool = True,
    ) -> None:
        if source.batches < 1:
            raise LinvitError(f"an epoch has no full batch of {config.batch_size} images: set a smaller batch_size")
        self.accelerator, self.config, self.source, self.phases = accelerator, config, source, list(phases)
        self.model = model.to(accelerator.device)
        share_from_first(accelerator, self.model.state_dict().values())
        self.folder, self.models = folder if accelerator.is_main_process else None, models
        self.evaluate, self.watch = evaluate, watch if accelerator.is_main_process else None
        self.epoch_steps = source.batches / config.accumulate
        counts = [max(1, round(phase.stage.epochs * self.epoch_steps)) for phase in phases]
        self.ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        self.steps, self.step = self.ends[-1], 0
        self.objective: Objective = self.phases[0].objective
        self.average = Average(self.model, config.ema, config.ema_ramp) if config.ema is not None else None
        self.masks = Masks(self.model, anneal=config.sparse_anneal, steps=self.steps)
        self.paths = [module.progress for module in self.model.modules() if isinstance(module, RampedDropPath)]
        self.window = Window(accelerator)
        settings = {key: value for key, value in config.to_dict().items() if key not in FREE}
        own = {"config": settings, "layers": layers_of(self.model), **(identity or {})}
        seconds = config.checkpoint_seconds
        mark = fingerprint(own, self.model.state_dict())
        self.keeper = Keeper(accelerator, folder, mark, self.model, self.average, seconds, models)
        self.speeds: list[float] = []
        self.before = ""  # in words, how the last window that was logged went
        self.strict = config.deterministic
        if accelerator.gradient_accumulation_steps != config.accumulate:
            raise LinvitError(f"make the accelerator with gradient_accumulation_steps={config.accumulate}")

    @property
    def begun(self) -> bool:
        """Whether there are checkpoints to go on from."""
        return self.keeper.checkpoints is not None and bool(self.keeper.checkpoints.files())

    def run(self, *, resume: bool = False) -> Outcome:
        """Train to the end. With `resume`, go on from the newest usable checkpoint, if there is one."""
        if self.begun and not resume:
            raise LinvitError(f"{self.keeper.folder} holds a run: --resume goes on with it, or give another folder")
        notes: list[str] = []
        found = self.keeper.restore(notes.append) if resume else None
        restored = None
        metrics: dict[str, float] = {}
        if found is not None:
            self.step, restored = found
            self.window.spent = restored[1]["seconds"]
            metrics = restored[1]["metrics"] if self.step == self.steps else {}  # of a run that was finished
            self.masks.take_back(restored[1]["kept"])
            notes.append(f"resumed after step {self.step} of {self.steps}")
        if self.folder is not None:
            cut_log(self.folder, self.step if restored is not None else -1)
        self.log = Log(self.folder, self.watch, self.step if restored is not None else -1)
        began = time.perf_counter()
        learning = {parameter: parameter.requires_grad for parameter in self.model.parameters()}
        try:
            for note in notes:
                self.log.add("note", self.step, {"text": note})
            self.stream = self.batches(self.step)
            with without_cudnn_attention(), repeatable(self.config.deterministic):
                if restored is None:
                    self.measure()  # what conversion left, before anything is learnt
                for phase, end in zip(self.phases, self.ends, strict=True):
                    if self.step < end:
                        metrics = self.run_stage(phase, end, restored)
                        restored = None
                metrics = metrics or self.measure()
            if self.models:
                self.keeper.finish()
        finally:
            self.log.close()
            for objective in (self.objective, *(phase.objective for phase in self.phases)):
                getattr(objective, "rest", lambda: None)()  # a step that failed leaves its objective listening
            for parameter, learnt in learning.items():
                parameter.requires_grad_(learnt)
        best = self.keeper.best[1] if self.keeper.best is not None else {}
        speed = round(median(self.speeds[1:] or self.speeds), 1) if self.speeds else None
        shown = {**best.get("metrics", {}), "step": best["step"]} if best else {}
        return Outcome(self.step, round(time.perf_counter() - began, 2), speed, metrics, shown)

    def run_stage(self, phase: Phase, end: int, restored: Restored | None) -> dict[str, float]:
        """The rest of a stage, up to step `end`; the metrics at its end."""
        config, stage = self.config, phase.stage
        start = max([0, *(other for other in self.ends if other < end)])
        self.trainable = select_trainable(self.model, stage.trainable)
        optimiser = make_optimiser(config, self.model, self.trainable)
        self.accelerator._optimizers.clear()  # a finished stage's would stay, with all its moments
        self.optimiser = self.accelerator.prepare_optimizer(optimiser, device_placement=False)
        self.window.begin()
        if phase.prepare is not None and self.step == start:
            phase.prepare(self.source.epoch(0))
            share_from_first(self.accelerator, self.model.parameters())
        if restored is not None and self.step > start:
            self.keeper.restore_optimiser(optimiser, restored)
        elif self.average is not None:
            self.average.restart()
        self.rates = [torch.zeros((), device=self.accelerator.device) for _ in optimiser.param_groups]
        self.capture = Capture(
            captures(config, self.accelerator), lambda text: self.log.add("note", self.step, {"text": text})
        )
        schedule = stage_schedule(config, stage, end - start, self.epoch_steps)
        self.objective = phase.objective
        self.masks.asleep = stage.objective != "supervised"  # alignment is to what is left for inference
        mesa = None
        if config.mesa and self.average is not None and stage.objective == "supervised":
            self.objective = mesa = Mesa(phase.objective, self.model, self.average.model, config.mesa)
        compute = phase.step(self.objective, self.model, config, self.accelerator.device)
        every = max(1, round(config.eval_epochs * self.epoch_steps))
        metrics: dict[str, float] = {}
        measured = -1
        self.model.train()
        self.window.good.fill_(self.step)
        self.window.stop_clock()
        self.window.begin()
        while self.step < end:
            progress = (self.step - start - schedule.warmup) / max(1, end - start - schedule.warmup)
            set_progress(self.paths, progress)
            if mesa is not None:
                mesa.active = progress >= config.mesa_start
            lr = schedule(self.step - start)
            self.take_step(compute, lr)
            if self.average is not None:
                self.average.update(self.step - start + 1)
                if mesa is not None:  # what the average says has BatchNorm's statistics in it, each process's own
                    share_from_first(self.accelerator, self.average.model.buffers())
            self.step += 1
            ended = self.step == end
            if ended or self.step % config.log_steps == 0 or self.step % every == 0:
                self.write_log(stage, lr)
            if ended and not all_finite(self.model):
                self.stop_diverged(self.step - 1)
            if ended or self.step % every == 0:
                metrics = self.measure()
                measured = self.step
            if self.keeper.due() or (self.step == self.steps and self.models):
                self.window.stop_clock()
                known = {"seconds": self.window.spent, "kept": self.masks.pending()}
                known["metrics"] = metrics if measured == self.step else {}
                self.keeper.save(self.step, self.optimiser, self.window.bad, known)
                self.window.start_clock()
        if mesa is not None:
            mesa.rest()
        return metrics

    def take_step(self, compute: Step, lr: float) -> None:
        """One step of the optimiser. Nothing here waits for the device."""
        self.seed_step(self.step)
        self.masks.before(self.step)
        for group, rate in zip(self.optimiser.param_groups, self.rates, strict=True):
            wanted = lr * group["times"]
            rate.fill_(wanted)
            group["lr"] = rate if self.capture.wanted else wanted  # a recorded step reads the rate from the device
        parts = self.config.accumulate
        clear = self.optimiser.optimizer.zero_grad
        if parts == 1:
            images, targets = next(self.stream)
            images = resized(images, self.config, self.step)
            kind = getattr(self.objective, "active", None)  # MESA begins some time
            self.capture(lambda *batch: self.work(compute, [batch]), clear, kind, images, targets)
        else:
            clear()
            batches = (next(self.stream) for _ in range(parts))
            self.work(compute, ((resized(images, self.config, self.step), targets) for images, targets in batches))
        self.window.count(parts)
        self.masks.after(self.step)

    def work(self, compute: Step, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
        """What a step does on the device, from its batches to the moved weights."""
        wrong = torch.zeros((), device=self.accelerator.device)
        for images, targets in batches:
            entries = self.differentiate(compute, images, targets)
            self.window.note(entries)
            wrong = wrong + ~torch.isfinite(entries["loss"].detach())
        scaler = self.accelerator.scaler
        wrong = average_gradients(self.accelerator, self.trainable.values(), wrong)
        if scaler is not None:
            self.accelerator.unscale_gradients(self.optimiser)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.trainable.values() if p.grad is not None])
        if scaler is None:  # with a scaler, an infinite gradient is an everyday thing: that step is left out
            wrong = wrong + ~torch.isfinite(norm)
        self.window.close_step(norm, wrong)
        clip(self.config, self.trainable, norm)
        if scaler is not None:
            self.optimiser.step()
        else:  # the device itself leaves out steps after a bad loss, so that good weights stay good
            raw = self.optimiser.optimizer
            raw.grad_scale, raw.found_inf = None, self.window.bad
            raw.step()

    def differentiate(self, compute: Step, images: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """What the objective says of a batch, with its gradients added. Where something in it has no deterministic
        algorithm, which shows in a run's first batch, the run goes on without."""
        try:
            with self.accelerator.autocast():
                entries = compute(images, targets)
            if not entries["loss"].requires_grad:
                raise LinvitError("nothing that this stage trains takes part in its loss: see its trainable")
            with strictly(self.strict):
                self.accelerator.backward(entries["loss"])
        except RuntimeError as error:
            if not (self.strict and undetermined(error)):
                raise
            reason = str(error).split(",")[0].splitlines()[0]
            self.log.add("note", self.step, {"text": f"a resumed run may not have the same bits: {reason}"})
            self.strict = False
            self.optimiser.optimizer.zero_grad()
            self.seed_step(self.step)
            return self.differentiate(compute, images, targets)
        return entries

    def batches(self, step: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of all epochs in a row, from a step on."""
        epoch, skip = divmod(step * self.config.accumulate, self.source.batches)
        while True:
            yield from self.source.epoch(epoch, skip)
            epoch, skip = epoch + 1, 0

    def seed_step(self, step: int) -> None:
        seed = (self.config.seed * 1_000_003 + step) * 4099 + self.accelerator.process_index
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every kind of device, each step
        if self.accelerator.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def write_log(self, stage: Stage, lr: float) -> None:
        """Fetch the window in one go, stop if a loss was no number, and log."""
        values, bad = self.window.read()
        if bad is not None:
            self.stop_diverged(bad)
        self.window.stop_clock()
        speed = self.window.images_per_second(self.config.batch_size)
        self.speeds += [speed] if speed is not None else []
        self.before = f"before, the loss was {values['loss']:.3g}, the gradient's norm {values['gradient_norm']:.3g}; "
        record = {"stage": stage.name, **self.so_far(), **values, "lr": lr, "images_per_second": speed}
        kept = self.masks.take_history(self.step)
        self.log.add("train", self.step, {**record, "steps": self.steps, **({"kept": kept} if kept else {})})
        self.window.begin()

    def measure(self) -> dict[str, float]:
        """Evaluate the shown weights, and keep them if they are the best."""
        if self.evaluate is None:
            return {}
        shown = self.keeper.shown
        if self.config.bn_images:
            count = -(-self.config.bn_images * self.config.accumulate // self.config.batch_size)
            batches = (images for (images, _), _ in zip(self.source.epoch(0, mixed=False), range(count), strict=False))
            with self.accelerator.autocast():
                measure_batch_norm(shown, batches, partial(self.accelerator.reduce, reduction="mean"))
        share_from_first(self.accelerator, shown.buffers())
        shown.eval()
        with torch.no_grad(), self.accelerator.autocast():
            metrics = dict(self.evaluate(shown))
        self.model.train()
        score = next((metrics[name] for name in SCORES if name in metrics), None)
        if score is None:
            raise LinvitError(f"evaluation gave {', '.join(metrics) or 'nothing'}: it must give {' or '.join(SCORES)}")
        self.keeper.offer(self.step, score, metrics)
        self.log.add("eval", self.step, {**self.so_far(), **metrics})
        self.window.begin()
        return metrics

    def so_far(self) -> dict[str, float]:
        """Epochs and seconds of training, without evaluations and checkpoints."""
        return {"epoch": round(self.step / self.epoch_steps, 4), "seconds": round(self.window.spent, 3)}

    def stop_diverged(self, step: int) -> None:
        """Run the batch of the bad step again to find the layer, and say what is left."""
        self.seed_step(step)
        where, parts = None, range(self.config.accumulate)
        for (images, targets), _ in zip(self.batches(step), parts, strict=False):
            with self.accelerator.autocast():
                where = where or find_bad_layer(self.model, self.objective, resized(images, self.config, step), targets)
        where = next((place for place in gather_object([where]) if place), None)  # it may be another process's batch
        files = self.keeper.checkpoints.files() if self.keeper.checkpoints else []
        left = f"the last good checkpoint is {files[0]}" if files else "there was no checkpoint yet"
        began = f"it began in {where}" if where else "the step went well when it was run again"
        message = f"the loss is no number any more in step {step + 1}: {began}; {self.before}{left}"
        self.log.add("note", self.step, {"text": message}, shown=False)
        raise Diverged(f"{message}; a lower lr, a clip_norm or precision=fp32 may help")
