"""One step of the optimiser: forward, backward, averaged over processes, clipped, and the weights moved.

With several processes the backward pass averages the gradients while it goes: DistributedDataParallel sends the last
layers' while the first layers' are still computed. It looks for unused parameters in each step, which stages that train
a part of the model need; its buckets then stay as they were made, so that a resumed run adds in the same order.
"""

import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from linvit.errors import LinvitError
from linvit.training.config import Config, Stage
from linvit.training.contract import Batch
from linvit.training.engine.phases import Capture, Step, captures, strictly
from linvit.training.optimisation import clip, make_optimiser, select_trainable
from linvit.training.processes import Processes


class StageModule(nn.Module):
    """A step as a module, for DistributedDataParallel: whatever an objective calls of the model, its layers one by one
    too, is inside this forward pass. One parameter is never used, or PyTorch would warn where all others are."""

    def __init__(self, model: nn.Module, compute: Step) -> None:
        super().__init__()
        self.model, self.compute = model, compute
        self.unused = nn.Parameter(torch.zeros((), device=next(model.parameters()).device))

    def forward(self, batch: Batch) -> dict[str, Tensor]:
        return {name: value if name == "loss" else value.detach() for name, value in self.compute(batch).items()}


class Meters:
    """Sums over the steps since the last log line, and the flag that a loss was not finite. Reading them waits for the
    device; nothing else does."""

    def __init__(self, processes: Processes, config: Config) -> None:
        self.processes, self.config = processes, config
        self.bad = torch.zeros((), device=processes.device)  # 1 from the first step whose loss is NaN or infinite
        self.good = torch.zeros((), device=processes.device)  # the step before which all were finite
        self.sums, self.norms = (torch.zeros((), device=processes.device) for _ in range(2))
        self.names: list[str] = []
        self.seconds = 0.0  # of training so far
        self.speeds: list[float] = []  # images a second, one for each time it was read
        self.begin()

    def begin(self) -> None:
        """Count from here, and let the clock run."""
        self.start_clock()
        self.steps = 0
        self.sums.zero_()
        self.norms.zero_()

    def note(self, entries: Mapping[str, Tensor]) -> None:
        """Add what an objective returned for a batch. The sums stay where they are, as a recorded step needs it."""
        self.names = list(entries)
        values = torch.stack([value.detach().float() for value in entries.values()])
        if self.sums.shape != values.shape:
            self.sums = torch.zeros_like(values)
        self.sums.add_(values)

    def close_step(self, norm: Tensor, bad: Tensor) -> None:
        """Add a step's gradient norm, and whether anything in it was not finite."""
        self.norms.add_(norm)
        self.bad.copy_(torch.maximum(self.bad, (bad > 0).float()))
        self.good.add_(1 - self.bad)

    def stop_clock(self) -> None:
        """What comes now, an evaluation or a checkpoint, is no training time; `begin` or `start_clock` ends it."""
        self.seconds += time.perf_counter() - self.began

    def start_clock(self) -> None:
        self.began, self.timed = time.perf_counter(), 0

    def read(self) -> tuple[dict[str, float], int | None]:
        """Means over the steps and all processes; and the first bad step, if there was one."""
        means = self.processes.mean(self.sums) / (self.steps * self.config.accumulate)
        others = torch.stack([self.norms / self.steps, self.bad, self.good])
        *values, norm, bad, good = torch.cat([means, others]).tolist()
        found = dict(zip(self.names, values, strict=True))
        return {**found, "gradient_norm": norm}, int(good) if bad else None

    def peek(self) -> dict[str, float]:
        """This process's means so far, of which the sums go on."""
        means = self.sums / (self.steps * self.config.accumulate)
        return dict(zip(self.names, means.tolist(), strict=True))

    def rate(self) -> float | None:
        """Images a second since the clock started; asked when the device has caught up, as after `read` or `peek`."""
        return round(self.timed * self.config.batch_size / (time.perf_counter() - self.began), 1) or None

    def images_per_second(self) -> float | None:
        """The rate, which counts for the run's speed."""
        found = self.rate()
        self.speeds += [found] if found is not None else []
        return found

    @property
    def speed(self) -> float | None:
        """The median of the speeds, without the first, which warms up."""
        return round(median(self.speeds[1:] or self.speeds), 1) if self.speeds else None


class Stepper:
    """Takes the steps of a run, stage by stage. `note` hears what a user should know."""

    compute: Step

    def __init__(
        self, processes: Processes, model: nn.Module, config: Config, meters: Meters, note: Callable[[str], None]
    ) -> None:
        self.processes, self.model, self.config = processes, model, config
        self.meters, self.note = meters, note
        self.strict = config.deterministic

    def begin_stage(self, stage: Stage) -> None:
        """A new optimiser for what this stage trains."""
        self.trainable = select_trainable(self.model, stage.trainable)
        self.optimiser = make_optimiser(self.config, self.model, self.trainable)
        self.rates = [torch.zeros((), device=self.processes.device) for _ in self.optimiser.param_groups]
        self.capture = Capture(captures(self.config, self.processes), self.note)

    def minimise(self, compute: Step) -> None:
        """Minimise this from now on."""
        self.compute = compute
        if self.processes.world > 1:
            module = StageModule(self.model, compute)
            with warnings.catch_warnings():  # of another name for broadcast_buffers, which older versions do not know
                warnings.simplefilter("ignore", FutureWarning)
                self.compute = DistributedDataParallel(module, find_unused_parameters=True, broadcast_buffers=False)

    def seed(self, step: int) -> None:
        """A step's randomness depends on the run's seed, the step and the process, and on nothing before it."""
        seed = (self.config.seed * 1_000_003 + step) * 4099 + self.processes.rank
        torch.default_generator.manual_seed(seed)  # torch.manual_seed asks every kind of device, each step
        if self.processes.device.type == "cuda":
            torch.cuda.manual_seed(seed)

    def take(self, step: int, lr: float, batches: Iterator[Batch], variant: Hashable = None) -> None:
        """One step with the next batches. Nothing here waits for the device."""
        for group, rate in zip(self.optimiser.param_groups, self.rates, strict=True):
            wanted = lr * group["times"]
            rate.fill_(wanted)
            group["lr"] = rate if self.capture.wanted else wanted  # a recorded step reads the rate from the device
        if self.config.accumulate == 1:
            self.capture(lambda batch: self.work(step, [batch]), self.optimiser.zero_grad, variant, next(batches))
        else:
            self.optimiser.zero_grad()
            self.work(step, islice(batches, self.config.accumulate))
        self.meters.steps += 1
        self.meters.timed += 1

    def work(self, step: int, batches: Iterable[Batch]) -> None:
        """What a step does on the device, from its batches to the moved weights."""
        bad = torch.zeros((), device=self.processes.device)
        for part, batch in enumerate(batches, start=1):
            entries = self.differentiate(step, batch, last=part == self.config.accumulate)
            self.meters.note(entries)
            bad = bad + ~torch.isfinite(entries["loss"].detach())
        bad, scaler = self.processes.mean(bad), self.processes.scaler
        if scaler is not None:
            scaler.unscale_(self.optimiser)
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.trainable.values() if p.grad is not None])
        if scaler is None:  # with a scaler, an infinite gradient is an everyday thing: that step is left out
            bad = bad + ~torch.isfinite(norm)
        self.meters.close_step(norm, bad)
        clip(self.config, self.trainable, norm)
        if scaler is not None:
            scaler.step(self.optimiser)
            scaler.update()
        else:  # the device itself leaves out steps after a bad loss, so that good weights stay good
            self.optimiser.grad_scale, self.optimiser.found_inf = None, self.meters.bad  # type: ignore[attr-defined]
            self.optimiser.step()

    def differentiate(self, step: int, batch: Batch, last: bool) -> dict[str, Tensor]:
        """What the objective says of a batch, with its gradients added; the last part of a step averages them. Where
        something has no deterministic algorithm, which shows in a run's first batch, the run goes on without."""
        parallel = isinstance(self.compute, DistributedDataParallel)
        try:
            with self.compute.no_sync() if parallel and not last else nullcontext():  # type: ignore[attr-defined]
                with self.processes.autocast():
                    entries = self.compute(batch)
                if not entries["loss"].requires_grad:
                    raise LinvitError("nothing that this stage trains takes part in its loss: see its trainable")
                loss, scaler = entries["loss"] / self.config.accumulate, self.processes.scaler
                with strictly(self.strict):
                    (loss if scaler is None else scaler.scale(loss)).backward()
        except RuntimeError as error:
            if not (self.strict and "deterministic" in str(error)):
                raise
            reason = str(error).split(",")[0].splitlines()[0]
            self.note(f"a resumed run may not have the same bits: {reason}")
            self.strict = False
            self.optimiser.zero_grad()
            if parallel:  # a new one, for this one waits for the rest of its gradients
                self.minimise(self.compute.module.compute)  # type: ignore[attr-defined]
            self.seed(step)
            return self.differentiate(step, batch, last)
        return entries
