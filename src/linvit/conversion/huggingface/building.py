"""Models of transformers from their folders and configs: how they are opened, noted by `linvit.save`, built again."""

import copy
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from timm.layers import resample_abs_pos_embed, to_2tuple
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedModel
from transformers.utils import logging

from linvit.conversion.dry_run import without_head
from linvit.errors import LinvitError, reason, unknown

INTERPOLATIONS = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # PIL's numbers
PREFIX = "transformers:"  # before a class's name, where a saved model's config has a timm name else


def from_config(name: str, config: dict[str, Any]) -> nn.Module:
    """A model of transformers by the name of its class, from its config and without weights."""
    cls: Any = getattr(transformers, name, None)
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        raise unknown("model of transformers", name, (n for n in dir(transformers) if n.endswith(("Model", "ation"))))
    kind: Any = cls.config_class
    try:
        return cls(kind.from_dict(harmless(config)))
    except Exception as error:  # whatever its config and constructor make of the values
        raise LinvitError(f"transformers' {name} cannot be built from its config: {reason(error)}") from error


def harmless(config: Any) -> Any:
    """The config without what names an implementation of attention: transformers may fetch and run it by its name."""
    if isinstance(config, dict):
        return {key: harmless(value) for key, value in config.items() if "implementation" not in str(key)}
    return copy.deepcopy(config)


def origin_of(model: PreTrainedModel) -> tuple[str, dict[str, Any]]:
    """The name and the config that build this model."""
    return PREFIX + type(model).__name__, model.config.to_diff_dict()


def open_folder(folder: Path, args: dict[str, Any], *, weights: bool = True) -> nn.Module:
    """The model of transformers in a folder, with its weights or fresh ones. `args` change its config: a classifier for
    other classes begins anew, and for another image size positions are resampled. Weights are safetensors, and no code
    is fetched."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    name = next((n for n in config.get("architectures") or () if hasattr(transformers, n)), "")
    name = name or type_of(config, folder)
    if "num_classes" in args:
        args = {"num_labels": args["num_classes"], **{key: args[key] for key in args if key != "num_classes"}}
    if "num_labels" in args and args["num_labels"] != len(config.get("id2label", ())):
        config = {key: value for key, value in config.items() if key not in ("id2label", "label2id")}
    model = from_config(name, {**config, **args})
    if weights:
        model, others = with_weights(folder, model, fitting=not args)
        if others:
            own = from_config(name, config)
            resample_positions(model, with_weights(folder, own, fitting=False)[0], others)
    note_processor(model, folder / "preprocessor_config.json")
    return model.eval()


def with_weights(folder: Path, model: Any, *, fitting: bool) -> tuple[Any, list[str]]:
    """A model like this one with the weights of a folder, and which of them are of another shape, the head's not
    counted. Where all should be `fitting`, what the folder lacks is the same each time."""
    settings = {"use_safetensors": True, "local_files_only": True, "ignore_mismatched_sizes": not fitting}
    try:
        with quiet(), torch.random.fork_rng(devices=(), enabled=fitting):
            if fitting:
                torch.manual_seed(0)
            model, told = type(model).from_pretrained(
                folder, config=model.config, output_loading_info=True, **settings
            )  # fmt: skip
    except Exception as error:  # no safetensors, a damaged file, whatever does not fit
        raise LinvitError(
            f"{folder} cannot be read as transformers' {type(model).__name__}: {reason(error)}"
        ) from error
    if fitting and told["missing_keys"]:
        lacking = ", ".join(sorted(told["missing_keys"])[:2])
        warnings.warn(f"{folder} has no weights for all of {type(model).__name__}: {lacking} begin anew", stacklevel=4)
    tensors = model.state_dict(keep_vars=True)
    inside = {id(tensor) for tensor in without_head(model).state_dict(keep_vars=True).values()}
    return model, sorted(name for name, *_ in told["mismatched_keys"] if id(tensors[name]) in inside)


@torch.no_grad()
def resample_positions(model: Any, own: Any, names: list[str]) -> None:
    """Give a model for another image size the tables of positions of its own, resampled."""
    before, after = (grid_in(each.config) for each in (own, model))
    tables, places = (each.state_dict(keep_vars=True) for each in (own, model))
    for name in names:
        table, place = tables[name], places[name]
        positions = "position_embedding" in name and table.shape[-1] == place.shape[-1]
        if not positions or before is None or after is None:
            have, want = tuple(table.shape), tuple(place.shape)
            raise LinvitError(f"the weights do not fit what --model-arg asks for: {name} is {have} and would be {want}")
        prefix = table.shape[-2] - before[0] * before[1]
        rows = resample_abs_pos_embed(table.reshape(1, *table.shape[-2:]), after, before, prefix)
        place.copy_(rows.reshape(place.shape))


def grid_in(config: Any) -> tuple[int, int] | None:
    """How many patches a config's images have, down and across."""
    image, patch = (getattr(config, name, None) for name in ("image_size", "patch_size"))
    if image is None or patch is None:
        return None
    (height, width), (down, across) = to_2tuple(image), to_2tuple(patch)
    return height // down, width // across


def type_of(config: dict[str, Any], folder: Path) -> str:
    """The class that transformers has for a type of model, where a config names none."""
    kind = CONFIG_MAPPING.get(config.get("model_type", ""), None)
    found = None if kind is None else MODEL_MAPPING.get(kind, None)
    if found is None:
        raise LinvitError(f"transformers knows no model of type '{config.get('model_type')}', which {folder} has")
    return str(getattr(found, "__name__", ""))


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' table of what was loaded, and its bar."""
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def note_processor(model: Any, path: Path) -> None:
    """Note on a model what its image processor does to pictures, as timm's data config says it, and the processor."""
    if not path.is_file():
        return
    told = json.loads(path.read_text(encoding="utf-8"))
    size, crop = told.get("size") or {}, told.get("crop_size") or {}
    size = {"height": size, "width": size} if isinstance(size, int) else size
    crop = {"height": crop, "width": crop} if isinstance(crop, int) else crop
    seen = crop if told.get("do_center_crop") and crop else size
    height = seen.get("height") or seen.get("shortest_edge")
    facts: dict[str, Any] = {"mean": told.get("image_mean"), "std": told.get("image_std")}
    facts["interpolation"] = INTERPOLATIONS.get(told.get("resample"))
    if height:
        facts["input_size"] = (3, height, seen.get("width") or height)
        edge = size.get("shortest_edge") or size.get("height") or height
        facts["crop_pct"] = round(height / edge, 4)
    known = {key: tuple(value) if isinstance(value, list) else value for key, value in facts.items() if value}
    model.pretrained_cfg = model.default_cfg = known
    model.linvit_processor = told
