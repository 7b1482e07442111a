"""One side of the page: a model by a plan at a size, and what it sees of a picture."""

import base64
import copy
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from linvit import clock
from linvit.conversion import convert, resample
from linvit.conversion.convert import own_size
from linvit.conversion.refusing import told
from linvit.errors import LinvitError, NotHonoured
from linvit.figures.attention import Seen, SeenLayer, look, watchable
from linvit.models.dense import DenseModel
from linvit.page.cache import Cache
from linvit.page.catalogue import Base, Catalogue, weight_bytes
from linvit.page.pictures import jpeg
from linvit.tasks.classify.augmenting import normalise, statistics
from linvit.tasks.classify.preprocessing import Preprocessing
from linvit.tasks.dense.fitting import trained_settings
from linvit.tasks.dense.loading import batch_of, statistics_of
from linvit.tasks.predicting import Predictor

ROOM = 3 * 2**30  # bytes of converted models
BUDGET = 0.6  # seconds that a model is timed for

Tell = Callable[[dict[str, Any]], None]  # of how far the work is; raises when nobody waits any more


@dataclass(frozen=True)
class Wish:
    """What the page asks a side to be."""

    model: str
    plan: str
    size: int


@dataclass(frozen=True)
class Look:
    """What a side saw of a picture: its maps, the pixels that they lie on, and what it says."""

    seen: Seen
    view: np.ndarray  # (height, width, 3)
    answer: dict[str, Any]

    @property
    def bytes(self) -> int:
        tensors = (t for layer in self.seen.layers for t in (layer.q, layer.k, layer.v, layer.features))
        return self.view.nbytes + sum(t.nbytes for t in tensors if t is not None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "view": data_url(jpeg(self.view)),
            "height": self.view.shape[0],
            "width": self.view.shape[1],
            "layers": [layer_dict(layer) for layer in self.seen.layers],
            "answer": self.answer,
        }


def layer_dict(layer: SeenLayer) -> dict[str, Any]:
    return {
        "name": layer.name,
        "mechanism": layer.mechanism.name,
        "heads": layer.heads,
        "windows": layer.windows,
        "prefix": layer.grid.prefix,
        "grid": [layer.grid.height, layer.grid.width],
        "placed": layer.placed,
        "note": layer.note,
        "features": layer.patch_features() is not None,
    }


def data_url(picture: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"


class Side:
    """A converted model, asked by one visitor at a time."""

    def __init__(self, base: Base, plan: Any, size: int) -> None:
        self.size, self.lock = size, threading.Lock()
        self.model = copy.deepcopy(base.model)
        self.notes = [base.note] if base.note else []
        with told((size, size)):
            if (size, size) != own_size(self.model):
                resample(self.model, size=size)
        if plan is not None:
            self.convert(plan)
        self.model.eval()
        self.dense = isinstance(self.model, DenseModel)

    def convert(self, plan: Any) -> None:
        try:
            convert(self.model, plan, size=self.size)
        except NotHonoured as lacking:
            convert(self.model, plan, size=self.size, drop=lacking.features)
            self.notes.append(f"gives up {' and '.join(feature.replace('_', ' ') for feature in lacking.features)}")

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @cached_property
    def twin(self) -> nn.Module:
        """The same model, to be watched; its weights are the same tensors where it is converted throughout."""
        weights = {id(tensor): tensor for tensor in (*self.model.parameters(), *self.model.buffers())}
        return watchable(copy.deepcopy(self.model, weights), (self.size, self.size))

    @cached_property
    def predictor(self) -> Predictor:
        fits = self.dense or Preprocessing.of(self.model).size != (self.size, self.size)
        return Predictor(self.model, size=self.size if fits else None, device=self.device.type)

    def see(self, pixels: Tensor, tell: Tell) -> Look:
        """What it makes of a picture, bytes `(3, height, width)`."""
        image, view = self.input(pixels)
        with self.lock:
            tell({"stage": "reading the maps"})
            seen = look(self.twin, image.to(next(self.twin.parameters()).dtype))
            tell({"stage": "asking the model"})
            return Look(seen, view, self.answer(pixels))

    def input(self, pixels: Tensor) -> tuple[Tensor, np.ndarray]:
        """The picture as the model takes it, `(1, channels, height, width)`, and the same to look at."""
        if isinstance(self.model, DenseModel):
            settings = trained_settings(self.model, self.size)
            image, _ = batch_of([pixels], settings, self.device)
            mean, std = statistics_of(settings, self.device)
            shown = image[0] * std.view(-1, 1, 1) + mean.view(-1, 1, 1)
            return image, shown.clamp(0, 255).byte().permute(1, 2, 0).cpu().numpy()
        how = Preprocessing.of(self.model, self.size)
        picture = Image.fromarray(pixels.permute(1, 2, 0).numpy()).convert(how.mode)
        taken = how.evaluation()(picture)
        image = normalise(taken[None].to(self.device), *statistics(how, self.device))
        return image, taken.expand(3, -1, -1).permute(1, 2, 0).numpy()

    def answer(self, pixels: Tensor) -> dict[str, Any]:
        """Classes, objects or shares, as plain data; of a dense model drawn too."""
        try:
            begin = time.perf_counter()
            found = self.predictor(pixels)
            answer = {**found.to_dict(), "ms": 1e3 * (time.perf_counter() - begin)}
            return {**answer, "drawn": data_url(jpeg(found.draw()))} if self.dense else answer
        except LinvitError as reason:  # maps can be looked at all the same
            return {"error": " ".join(str(reason).split())}


class Sides:
    """Those that were asked for, while there is room for them."""

    def __init__(self, catalogue: Catalogue) -> None:
        self.catalogue = catalogue
        self.made: Cache[Side] = Cache(ROOM, lambda side: 2 * weight_bytes(side.model))
        self.measuring = threading.Lock()  # speeds are taken one after the other, or they would measure each other

    def get(self, wish: Wish, tell: Tell) -> Side:
        base, plan = self.catalogue.base(wish.model), self.catalogue.plan(wish.plan)
        if wish.size not in base.sizes:
            raise LinvitError(f"{wish.model} is shown at {', '.join(map(str, base.sizes))} pixels, not at {wish.size}")

        def make() -> Side:
            tell({"stage": "converting the model" if plan is not None else "preparing the model"})
            return Side(base, plan, wish.size)

        return self.made.get(wish, make)

    def latency(self, wishes: Sequence[Wish], tell: Tell) -> dict[str, Any]:
        """Milliseconds for one image of each, taken by turns."""
        sides = [self.get(wish, tell) for wish in wishes]
        while not self.measuring.acquire(timeout=0.2):
            tell({"stage": "waiting for another measurement"})
        try:
            timings = timed(sides, tell)
        finally:
            self.measuring.release()
        return {"size": wishes[0].size, "sides": [vars(timing) for timing in timings]}


@torch.inference_mode()
def timed(sides: Sequence[Side], tell: Tell) -> list[clock.Timing]:
    """By turns, as `clock.by_turns` does it; each call tells how far it is, and ends all where nobody waits."""
    done, expected = 0, 0

    def call(side: Side) -> Callable[[], object]:
        channels = 3 if side.dense else len(Preprocessing.of(side.model).mean)
        image = torch.randn(1, channels, side.size, side.size).to(next(side.model.parameters()))

        def run() -> object:
            nonlocal done
            tell({"stage": "measuring", "part": min(1.0, done / expected) if expected else 0.0})
            done += 1
            return side.model(image)

        return run

    calls = [call(side) for side in sides]
    device = sides[0].device
    with told((sides[0].size, sides[0].size)):
        for run in calls:  # to warm up
            run()
        mean = sum(clock.sample([run], device) for run in calls) / len(calls)
        expected = len(calls) * (3 + max(1 if mean > 2 * BUDGET else 3, min(200, int(BUDGET / mean))))
        return clock.by_turns(calls, device, latency=True, budget=BUDGET)
