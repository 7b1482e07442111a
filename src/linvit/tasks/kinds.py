"""What `linvit.train` and `linvit.evaluate` ask of a kind of task; each task answers it."""

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from linvit.conversion import Plan, open_model
from linvit.conversion.hub.fetching import CONFIG, fetch_model, kind_in, repository
from linvit.conversion.opening import check_name
from linvit.conversion.rebuilding import hugging
from linvit.conversion.saving import SavedConfig, read_config
from linvit.errors import LinvitError
from linvit.images import Progress, quiet
from linvit.models.dense import HEADS
from linvit.tasks.fitting import Fitting
from linvit.training import Config, Processes
from linvit.training.checkpoints import Watch

Model = nn.Module | str | Path
Note = Callable[[str], None]
DEFAULT_HEADS = {"detect": "faster_rcnn", "segment": "semantic_fpn"}
TASKS = ("classify", *DEFAULT_HEADS, "features")
OTHERS = ("transformers", "timm")  # who saves models besides linvit


@dataclass(frozen=True)
class Reading:
    """How a user wants a set to be read: where a named one lies, by which loader, with how many workers."""

    root: str | Path | None = None
    loader: str = "auto"
    workers: int = 4
    progress: Progress = quiet


class Kind:
    """A task, as far as training does not know it: its sets, its models, and how the two are brought together."""

    task: str
    batch: int  # images that are measured together, unless told

    def open_sets(self, data: Any, reading: Reading) -> Any:
        """The training and the validation set, opened, and how they are read."""
        raise NotImplementedError

    def settle(self, config: Config, sets: Any, settings: list[str], note: Note) -> Config:
        """The recipe as it suits the sets."""
        return config

    def start(self, model: Model, sets: Any, config: Config, *, pretrained: bool, args: dict[str, Any]) -> nn.Module:
        """The model to train, with an output for each class of the set."""
        raise NotImplementedError

    def check_original(self, original: Any, model: Model, sets: Any, plan: Plan, pretrained: bool, note: Note) -> None:
        """Whether a model that is going to be converted has something to teach."""

    def fit(self, model: nn.Module, sets: Any, config: Config, **how: Any) -> Fitting:
        """The model, the sets and the recipe brought together."""
        raise NotImplementedError

    def open_split(self, model: Model, data: Any, split: str, reading: Reading, note: Note) -> Any:
        """The set to measure a model on."""
        raise NotImplementedError

    def evaluate(
        self,
        model: nn.Module,
        images: Any,
        *,
        teacher: Model | None,
        size: int | None,
        config: Config,
        processes: Processes,
        reading: Reading,
        note: Note,
    ) -> Any:
        """How good a model is on a set, in the precision and the batches of a config."""
        raise NotImplementedError


def kind_of(model: Model, task: str = "", head: str = "", pyramid: str = "") -> Kind:
    """The kind that a user means: by the model where that is a detector or segmenter, else by --task and --head. A
    model that is not there is told before its images are looked for."""
    if not isinstance(model, nn.Module):
        check_name(str(model))
    known = head_of(model)
    if known and (head or pyramid):
        raise LinvitError(f"{described(model)} has its head, {known}: leave --head and --pyramid out")
    if head and head not in HEADS:
        raise LinvitError(f"unknown head '{head}'; known: {', '.join(HEADS)}")
    found = HEADS[known or head].task if known or head else task or ("features" if is_bare(model) else "classify")
    if task and task not in TASKS:
        raise LinvitError(f"unknown task '{task}'; known: {', '.join(TASKS)}")
    if task and task != found:
        raise LinvitError(f"--task {task}, but {known or head} is made to {found}: give one that fits the other")
    if found in ("classify", "features") and pyramid:
        raise LinvitError("--pyramid is of detectors and segmenters: give --task too")
    if found == "features":
        from linvit.tasks.features.kind import Backbones

        return Backbones()
    if found == "classify":
        from linvit.tasks.classify.kind import Classify

        return Classify()
    from linvit.tasks.dense.kind import Dense

    return Dense(found, known or head or DEFAULT_HEADS[found], pyramid)


def head_of(model: Model) -> str:
    """The name of the dense model that this is; none for others."""
    name = name_of(model)
    return name if name in HEADS else ""


def is_bare(model: Model) -> bool:
    """Whether a model says that it has no classifier, or is one of Hugging Face's without; a timm name says nothing."""
    if isinstance(model, nn.Module):
        bare = hugging(model) and type(model).__name__.endswith("Model")
        return bare or getattr(model, "num_classes", None) == 0
    config, theirs = saved_config(model), others_config(model)
    if config is not None:
        bare = config.model.startswith("transformers:") and config.model.endswith("Model")
        return bare or config.args.get("num_classes") == 0
    return str((theirs.get("architectures") or [""])[0]).endswith("Model") or theirs.get("num_classes") == 0


def start_model(model: Model, seed: int, *, pretrained: bool, args: Mapping[str, Any]) -> nn.Module:
    """The model to train; the seed draws the weights that are not given."""
    torch.manual_seed(seed)
    if isinstance(model, nn.Module):
        return model
    built = open_model(str(model), pretrained=pretrained, args=args)
    if is_name(model):
        built.linvit_origin = {"name": str(model), "args": dict(args)}  # type: ignore[assignment]
    return built


def check_data(data: Any, sets: int) -> None:
    """Raise unless data are named, or so many sets that linvit opened."""
    if isinstance(data, str | Path):
        return
    opened = list(data) if isinstance(data, tuple | list) else [data]
    if len(opened) < sets or not all(hasattr(one, "name") for one in opened if one is not None):
        given = " and ".join(type(one).__name__ for one in opened[:2]) or "nothing"
        loop = "batches of your own are for your own loop, or as a BatchSource for linvit.training.Engine"
        raise LinvitError(f"data are a name, a folder or a .tar of images, not a {given}: {loop}")


def tell(processes: Processes, watch: Watch | None, text: str) -> None:
    """Let the user know something: `watch` hears it where there is one, else it is a warning."""
    if text and processes.first and watch is not None:
        watch({"kind": "note", "step": 0, "text": text})
    elif text and processes.first:
        warnings.warn(text, stacklevel=3)


def is_name(model: Model) -> bool:
    """Whether this is a timm name, on the hub or not, and no other model there."""
    if isinstance(model, nn.Module) or Path(model).is_dir():
        return False
    found = repository(str(model))
    return found is None or found.name.startswith("timm/")


def folder_of(model: Model) -> Path | None:
    """Where a saved model lies, that of the hub where its cache has it; none for a timm name and for a module."""
    if isinstance(model, nn.Module) or is_name(model):
        return None
    found = None if Path(model).is_dir() else repository(str(model))
    return Path(model) if found is None else fetch_model(found, weights=False)


def saved_config(model: Model) -> SavedConfig | None:
    """What linvit noted beside a model that it saved; none for others."""
    folder = folder_of(model)
    return None if folder is None or kind_in(folder) in OTHERS else read_config(folder)


def others_config(model: Model) -> dict[str, Any]:
    """What transformers or timm noted beside a model that they saved; nothing for others."""
    folder = folder_of(model)
    if folder is None or kind_in(folder) not in OTHERS:
        return {}
    found: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    return found


def name_of(model: Model) -> str:
    """The name that a recipe may go by: of a saved model its own, not its folder's."""
    if isinstance(model, nn.Module):
        noted: Any = getattr(model, "linvit_origin", {})
        return str(noted.get("name") or (getattr(model, "pretrained_cfg", None) or {}).get("architecture") or "")
    ours = saved_config(model)
    return str(model) if ours is None else ours.model


def described(what: Model | Plan | None) -> Any:
    """A model or a plan, for the run's record."""
    if isinstance(what, Plan):
        return what.to_dict()
    return type(what).__name__ if isinstance(what, nn.Module) else str(what or "")
