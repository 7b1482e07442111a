"""What a process keeps from one run to the next, so that a short run is spent on training.

The sets stay decoded on the device and the teachers loaded. Runs that differ in nothing but the seed use one model
object: the weights of the next seed are copied into it, and the steps that were compiled for it serve again. Results do
not depend on what was kept.
"""

import copy
import gc
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from linvit.codec import digest
from linvit.comparison.description.building import build_model, patch_of, resize, student_of
from linvit.comparison.description.dense import describe, load_trunk, open_dense_sets
from linvit.comparison.description.job import Job, describe_teacher
from linvit.comparison.results import ModelFacts, TrainedTeacher
from linvit.comparison.scheduling.store import Store
from linvit.errors import LinvitError
from linvit.tasks.classify.augmenting import normalise
from linvit.tasks.classify.data import Stream, open_data
from linvit.tasks.classify.fitting import Sets
from linvit.tasks.classify.preprocessing import Preprocessing
from linvit.tasks.classify.resident import Held
from linvit.tasks.dense.fitting import DenseSets
from linvit.training import Config, Phase
from linvit.training.objectives.teacher import open_teacher

HELD = 6  # decoded sets that stay, the latest ones
CALIBRATION, BATCH = 256, 64  # images to measure layers on, and how many at once
WORKERS = 8  # that read images for a detector or segmenter on a GPU, at most


@dataclass
class Bench:
    """A model with all that was made for it: the teacher it learns from, and its stages with their compiled steps."""

    key: str
    model: nn.Module
    guide: nn.Module | None = None
    phases: list[Phase] | None = None
    report: str | None = None
    layers: tuple[int, ...] | None = None  # the quadratic ones, where they were measured
    taught: float | None = None  # the teacher's score, where it was measured
    facts: ModelFacts | None = None


class Shared:
    """The things kept. One per process is enough."""

    def __init__(self) -> None:
        self.held: Held = {}
        self.sets: dict[tuple[str, str, str | None], Sets | DenseSets] = {}
        self.teachers: dict[tuple[str, str], nn.Module] = {}
        self.trunks: dict[tuple[str, str], nn.Module] = {}
        self.bench: Bench | None = None
        self.sharing = 1  # runs that have the device now

    def data(self, job: Job) -> Sets | DenseSets:
        """The job's training and validation set, from where this machine has it, if it is the same set."""
        name, root, head = job.places["data"], job.places.get("root", ""), job.identity.head
        wanted, of_features = job.training.data.digest, job.training.task == "features"
        if (name, root, wanted) not in self.sets:
            check_digest(name, "set", describe(name, root, head, job.training.task).digest, wanted)
            self.sets[name, root, wanted] = (
                open_dense_sets(name, root, head)
                if head
                else Sets(*open_data(name, root=root or None, unlabelled=of_features), held=self.held)
            )
        found = self.sets[name, root, wanted]
        return replace(found, workers=self.readers()) if isinstance(found, DenseSets) else found

    def readers(self) -> int:
        """Processes that read images for a detector or segmenter: over all runs no more than there are cores."""
        return max(1, min(WORKERS, (os.cpu_count() or 1) // self.sharing)) if torch.cuda.is_available() else 0

    def trunk(self, job: Job) -> nn.Module | None:
        """The classifier whose weights a detector's or segmenter's trunk starts from, where there is one."""
        wanted, folder = job.identity.architecture.get("trunk"), job.places.get("backbone", "")
        if not job.identity.head or wanted is None:
            return None
        if (folder, wanted) not in self.trunks:
            self.trunks = {(folder, wanted): load_trunk(folder, wanted)}
        return self.trunks[folder, wanted]

    def teacher(self, job: Job, store: Store, device: torch.device) -> nn.Module:
        """The softmax model that a job's candidate is made from and learns from."""
        wanted = job.training.teacher
        assert wanted is not None
        if isinstance(wanted, TrainedTeacher):
            source, mark = str(store.teacher_folder(wanted.key)), wanted.key
            if not Path(source).is_dir():
                raise LinvitError(
                    f"the weights of teacher {mark} are not in the store: put them into {source}, or delete "
                    f"runs/{mark}.json to train it again"
                )
        else:
            source, mark = job.places.get("teacher", wanted.name), str(wanted.digest)
        if (source, mark) not in self.teachers:
            if not isinstance(wanted, TrainedTeacher):
                check_digest(source, "teacher", describe_teacher(source)[0].digest, wanted.digest)
            self.teachers = {(source, mark): open_teacher(source).to(device).eval()}
        return self.teachers[source, mark].to(device)

    def prepare(self, job: Job, store: Store, config: Config, device: torch.device) -> Bench:
        """The bench of a job, with the weights its run starts from."""
        key = digest([job.affinity, str(device)])
        while len(self.held) > HELD:
            del self.held[next(iter(self.held))]
        if self.bench is not None and self.bench.key != key:
            self.forget()
        identity = job.training
        if identity.mode == "scratch":
            if identity.candidate.measured:
                raise LinvitError("layers=measured asks a trained model: use mode distil, or where=first in its place")
            return self.take(key, build_model(identity, seed=identity.seed, trunk=self.trunk(job)))
        teacher = self.teacher(job, store, device)
        aligned = any(stage.objective != "supervised" for stage in config.plan_of_stages())
        patch = patch_of(teacher)
        if aligned and identity.patch_size not in (None, patch):  # they would not see the same tokens
            told = f"recipe {config.recipe} aligns layers, and the teacher has patches of {patch}"
            raise LinvitError(f"{told}: use those")
        known = self.bench.layers if self.bench is not None else None
        images = None
        if identity.candidate.measured and known is None:
            if identity.head:
                raise LinvitError("layers=measured asks a classifier: name the layers to keep, or where=first")
            images = calibration(self.data(job).train, Preprocessing.of(teacher, identity.size, config.test_crop))
        student, report = student_of(teacher, identity, seed=identity.seed, calibrate=images, keep=known)
        new = self.bench is None
        bench = self.take(key, student)
        if new:
            bench.guide = copy.deepcopy(teacher)
            resize(bench.guide, None, identity.size)
            bench.report = str(report).splitlines()[0]
            bench.layers = report.sensitivity.keep if report.sensitivity is not None else None
        return bench

    def take(self, key: str, model: nn.Module) -> Bench:
        """The bench with these weights: a new one, or those of the next seed in the model that is there."""
        if self.bench is None:
            self.bench = Bench(key, model)
        else:
            copy_weights(model, self.bench.model)
        return self.bench

    def forget(self) -> None:
        """Let go of the bench: after a failure nobody knows what state it is in."""
        self.bench = None
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def clear(self) -> None:
        """Keep nothing on a device."""
        self.held.clear()
        self.teachers.clear()
        self.trunks.clear()
        self.forget()


def check_digest(name: str, what: str, found: str | None, wanted: str | None) -> None:
    if found != wanted:
        raise LinvitError(f"{name} is not the {what} this run is about: its digest is {found}, not {wanted}")


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """Make the target what the source is, in the tensors it has. A training that ended may have added some that are no
    weights (how far it had got), which the next one sets itself. Buffers that are not saved count too."""
    new = {**dict(source.named_parameters()), **dict(source.named_buffers())}
    saved = {*target.state_dict(), *dict(target.named_parameters())}
    for name, old in (*target.named_parameters(), *target.named_buffers()):
        assert name in new or name not in saved, f"{name} is not in the source"
        if name in new:
            assert new[name].shape == old.shape
            old.copy_(new[name])
    target.zero_grad(set_to_none=True)
    target.train()  # models that remember something of an evaluation forget it here


def calibration(images: Any, preprocessing: Preprocessing) -> list[Tensor]:
    """Images of the training set to measure layers on: always the same, taken evenly from all of it."""
    if isinstance(images, Stream):
        raise LinvitError(f"{images.name} can only be read in order: name the layers to keep")
    transform, count = preprocessing.evaluation(), min(CALIBRATION, len(images))
    pictures = [transform(images[i * len(images) // count][0].convert(preprocessing.mode)) for i in range(count)]
    mean, std = (255 * torch.tensor(values) for values in (preprocessing.mean, preprocessing.std))
    batch = torch.stack([torch.as_tensor(picture) for picture in pictures])
    return list(normalise(batch, mean, std).split(BATCH))
