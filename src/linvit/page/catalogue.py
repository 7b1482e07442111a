"""Which models and plans the page may ask for.

Models that were named at the start, and timm's by their names: a name from the page never reaches the file system, and
fetches nothing from the network unless the one who started the server said so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

from linvit.attention import list_mechanisms
from linvit.conversion import Plan, as_plan, list_plans, open_model, parse_plan
from linvit.conversion.convert import find_hosts, no_hosts, own_size
from linvit.conversion.plan import Auto, split_options
from linvit.errors import LinvitError, unknown
from linvit.models.dense import HEADS
from linvit.page.cache import Cache
from linvit.training import Processes

USUAL = "deit_tiny_patch16_224"
AS_IT_IS = "as it is"  # the plan of a model that is not converted
SHALLOW = 6  # layers, all of which MixA would keep quadratic
ROOM = 3 * 2**30  # bytes of models
MOST_WEIGHTS = 400_000_000  # of a model that the page names
STOPS = (0.5, 0.75, 1, 1.25, 1.5, 2, 2.5, 3, 4)  # of the resolution, by the model's own
LARGEST = 1024  # pixels a side, unless the model's own are more


@dataclass(frozen=True)
class Base:
    """A model as it was opened."""

    name: str
    model: nn.Module
    note: str  # what one must know of its weights

    @property
    def size(self) -> int:
        return max(own_size(self.model))

    @property
    def sizes(self) -> list[int]:
        """Resolutions to choose from: what the patches divide, around the model's own."""
        unit = self.unit
        rounded = {max(unit, round(self.size * stop / unit) * unit) for stop in STOPS}
        return sorted({size for size in rounded if 32 <= size <= max(LARGEST, self.size)} | {self.size})

    @property
    def unit(self) -> int:
        patch: Any = getattr(getattr(self.model, "patch_embed", None), "patch_size", 32)
        patch = max(patch) if isinstance(patch, tuple) else int(patch)
        return patch if patch > 4 else 32  # a pyramid's own patches are small, its last ones are not


class Catalogue:
    """Models and plans by what the page calls them. Models named at the start are opened at once and stay."""

    def __init__(
        self,
        models: Sequence[str] = (),
        plans: Sequence[str] = (),
        *,
        pretrained: bool = True,
        fetch: bool = False,
        device: str = "auto",
    ) -> None:
        if len(plans) > 2:
            raise LinvitError(f"--plan names the two plans that stand side by side, got {len(plans)}")
        self.device, self.fetch = Processes(device).device, fetch
        self.plans: dict[str, Plan | None] = {text: None if text == AS_IT_IS else parse_plan(text) for text in plans}
        refuse_auto(self.plans.values())
        self.timm = frozenset(timm.list_models()) - HEADS.keys()
        self.named = {name: self.opened(name, pretrained) for name in models}
        self.others: Cache[Base] = Cache(ROOM, lambda base: weight_bytes(base.model))

    def opened(self, name: str, pretrained: bool) -> Base:
        folder = saved_folder(name)
        model = open_model(str(folder) if folder else name, pretrained=pretrained)
        if not find_hosts(model):
            raise no_hosts(model)
        random = folder is None and not pretrained
        return Base(name, model.to(self.device).eval(), "random weights" if random else "")

    def base(self, name: str) -> Base:
        """A model by the name the page gives."""
        if name in self.named:
            return self.named[name]
        if name.partition(".")[0] not in self.timm or ("." in name and name not in timm.list_pretrained()):
            raise unknown("model", name, {*self.named, *self.timm})
        return self.others.get(name, lambda: self.from_timm(name))

    def from_timm(self, name: str) -> Base:
        weights = weights_of(name)
        if weights > MOST_WEIGHTS:
            raise LinvitError(
                f"{name} has {weights / 1e6:,.0f} million weights: name it at the start, linvit serve {name}"
            )
        return self.opened(name, self.fetch or fetched_before(name))

    def plan(self, text: str) -> Plan | None:
        """A plan by the text the page gives: one named at the start, or a name with options; files are not read."""
        text = text.strip()
        if text in self.plans:
            return self.plans[text]
        if text in ("", AS_IT_IS):
            return None
        name, options = split_options(text)
        plan = as_plan(name, **options)
        refuse_auto([plan])
        return plan

    def choices(self) -> dict[str, Any]:
        """What the page offers, and what it begins with: the first two models, or one by two plans."""
        names = list(self.named) or [USUAL]
        shallow = names[0] in self.named and len(find_hosts(self.named[names[0]].model)) <= SHALLOW
        other = AS_IT_IS if len(names) > 1 else "stella" if shallow else "mixa"
        plans = [*self.plans, *(AS_IT_IS, other)[len(self.plans) :]]
        everything = [*self.plans, AS_IT_IS, *list_plans(), *list_mechanisms()]
        return {
            "models": names,
            "timm": sorted(self.timm),
            "plans": [plan for plan in dict.fromkeys(everything) if plan != "auto"],
            "sides": [{"model": names[min(i, len(names) - 1)], "plan": plan} for i, plan in enumerate(plans)],
        }


def refuse_auto(plans: Any) -> None:
    if any(isinstance(plan, Auto) for plan in plans):
        raise LinvitError("the plan auto measures for minutes: let linvit plan write it, and give its JSON as --plan")


def saved_folder(name: str) -> Path | None:
    """The folder of a saved model, or in a run's folder that of its best."""
    folder = Path(name)
    if not folder.is_dir():
        return None
    inside = [folder / part for part in ("best", "last") if (folder / part / "config.json").is_file()]
    return folder if (folder / "config.json").is_file() or not inside else inside[0]


def weights_of(name: str) -> int:
    """How many a model would have; none where that cannot be told without building it."""
    try:
        with torch.device("meta"):
            model = timm.create_model(name.partition(".")[0])
    except Exception:  # whatever a constructor does that wants numbers
        return 0
    return sum(parameter.numel() for parameter in model.parameters())


def weight_bytes(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def fetched_before(name: str) -> bool:
    """Whether the hub's cache has a model's weights, so that they can be had without a download."""
    from huggingface_hub import try_to_load_from_cache

    hub: str | None = getattr(timm.get_pretrained_cfg(name), "hf_hub_id", None)
    return hub is not None and isinstance(try_to_load_from_cache(hub, "model.safetensors"), str)
