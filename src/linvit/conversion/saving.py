"""Save and load: the weights as safetensors, and beside them a config that says how to build the model around them.

The config holds the model's timm name and arguments, and for each converted layer its mechanism as built. So loading
needs neither the softmax original nor its weights, and does not probe or choose again.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from linvit.conversion.convert import own_size
from linvit.conversion.plan import Plan
from linvit.conversion.rebuilding import build, hugging, inner, install_layers, layers_of, origin
from linvit.conversion.weights import PICKLES
from linvit.errors import LinvitError
from linvit.version import __version__

FORMAT = 1
WEIGHTS, CONFIG = "model.safetensors", "config.json"
KINDS = {"model": str, "args": dict, "layers": list, "conversions": list, "preprocessing": dict, "dtype": str}


def save(
    model: nn.Module,
    folder: str | Path,
    *,
    model_name: str | None = None,
    model_args: Mapping[str, Any] | None = None,
) -> None:
    """Write the model into a folder, `model.safetensors` and `config.json`, for `linvit.load`.

    `model_args` are keyword arguments that `timm.create_model` was given, as far as they cannot be read off the model;
    `model_name` its name where the model does not know it. That the model can be built again is checked first.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    rows = layers_of(model)
    name, args = origin(model, model_name, model_args, rows)
    config = {
        "format": FORMAT,
        "linvit": __version__,
        "model": name,
        "args": args,
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "preprocessing": preprocessing(model),
        **({"classes": list(label_names(model))} if label_names(model) else {}),
        **({"held_out_of": noted(model)["held_out_of"]} if noted(model).get("held_out_of") else {}),
        "conversions": [{**done, "plan": done["plan"].to_dict()} for done in getattr(model, "linvit_conversions", [])],
        "layers": rows,
    }
    try:
        text = json.dumps(config, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise LinvitError(f"an argument of the model or an option of its layers cannot be saved: {error}") from None
    state = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in model.state_dict().items()}
    write_folder(
        Path(folder),
        {
            WEIGHTS: lambda path: safetensors.torch.save_file(state, path, {"format": "pt"}),
            CONFIG: lambda path: Path(path).write_text(text, encoding="utf-8"),
        },
    )


def load(folder: str | Path, *, device: str | torch.device = "cpu") -> nn.Module:
    """The model saved in a folder, in evaluation mode."""
    folder = Path(folder)
    config = read_config(folder)
    state = read_weights(folder / WEIGHTS)
    model = build(config["model"], config["args"])
    install_layers(model, config["layers"])
    model.to(getattr(torch, config["dtype"]))
    own = model.state_dict(keep_vars=True)
    wrong = next((key for key in sorted(own.keys() | state.keys()) if shape(own, key) != shape(state, key)), None)
    if wrong:
        raise LinvitError(f"{folder}: the weights do not fit the config, beginning with {wrong}: save the model again")
    for key, tensor in own.items():
        tensor.data = tensor.data.to(state[key].dtype)
    model.load_state_dict(state)
    model.linvit_origin = {"name": config["model"], "args": config["args"]}  # type: ignore[assignment]
    model.linvit_source = {"folder": str(folder.resolve())}  # type: ignore[assignment]
    model.linvit_conversions = [  # type: ignore[assignment]
        {**done, "plan": Plan.from_dict(done.get("plan"))} for done in config["conversions"]
    ]
    if not hugging(model) or "crop_pct" in config["preprocessing"]:
        note(model, **config["preprocessing"])
    if "classes" in config:
        note(model, label_names=tuple(config["classes"]))
    if "held_out_of" in config:
        note(model, held_out_of=config["held_out_of"])
    return model.to(device).eval()


def preprocessing(model: nn.Module) -> dict[str, Any]:
    """What happens to a picture before the model sees it, as timm's data config, at the model's present input size."""
    if hugging(model):  # its image processor knows the rest, unless it was trained here
        trained = {"crop_pct": noted(model)["crop_pct"]} if "crop_pct" in noted(model) else {}
        return {"input_size": (3, *own_size(model)), **trained}
    config = resolve_model_data_config(model)
    if built_for(model) is not None:
        config["input_size"] = (config["input_size"][0], *own_size(inner(model)))
    return config


def note(model: Any, **facts: Any) -> None:
    """Write on a model what is to be saved with it, where timm keeps it: `input_size`, `crop_pct`, `label_names`."""
    if "input_size" in facts and built_for(model) is not None:
        facts["built_for"] = built_for(model)
    model.pretrained_cfg = model.default_cfg = {**noted(model), **facts}


def noted(model: nn.Module) -> dict[str, Any]:
    found: Any = getattr(model, "pretrained_cfg", None)
    return found or {}


def built_for(model: nn.Module) -> Any:
    """The image size a model was built for, where it has one."""
    return getattr(getattr(inner(model), "patch_embed", None), "img_size", None)


def label_names(model: nn.Module) -> tuple[str, ...]:
    """The names of a model's classes, those it was trained on; none after it was given another number of outputs."""
    names = tuple(noted(model).get("label_names") or ())
    outputs = getattr(model, "num_classes", None) or getattr(getattr(model, "config", None), "num_labels", None)
    return names if len(names) == outputs else ()


def shape(tensors: Mapping[str, Tensor], key: str) -> tuple[int, ...] | None:
    return tuple(tensors[key].shape) if key in tensors else None


def read_config(folder: Path) -> dict[str, Any]:
    """The checked config of a saved model."""
    if folder.is_file():
        if folder.suffix in PICKLES:
            raise pickled(folder)
        raise LinvitError(f"{folder} is a file: give the folder that linvit.save wrote")
    if not folder.is_dir():
        raise LinvitError(f"there is no folder {folder}")
    path = folder / CONFIG
    if not path.is_file():
        pickle = next((file for file in sorted(folder.iterdir()) if file.suffix in PICKLES), None)
        raise pickled(pickle) if pickle else LinvitError(f"{folder} holds no {CONFIG}: linvit.save did not write it")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LinvitError(f"{path} is damaged: {error}") from None
    version = config.get("format") if isinstance(config, dict) else None
    if type(version) is not int or "linvit" not in config:
        raise LinvitError(f"{path} is not one that linvit.save wrote")
    if version > FORMAT:
        raise LinvitError(
            f"{path} has format {version}, written by linvit {config['linvit']}; this one reads up to {FORMAT}: upgrade"
        )
    for key, kind in KINDS.items():
        if not isinstance(config.get(key), kind):
            raise LinvitError(f"{path} is damaged: '{key}' is {config.get(key)!r}")
    loading = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}
    if loading & config["args"].keys():
        raise LinvitError(f"{path} asks for other weights than its own by '{min(loading & config['args'].keys())}'")
    for row in config["layers"]:
        if not isinstance(row, dict) or not {"name", "mechanism", "options", "grid", "dropped"} <= row.keys():
            raise LinvitError(f"{path} is damaged: a layer is {row!r}")
    classes = config.get("classes", [])
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise LinvitError(f"{path} is damaged: 'classes' is {classes!r}")
    if not isinstance(getattr(torch, config["dtype"], None), torch.dtype):
        raise LinvitError(f"{path} is damaged: 'dtype' is {config['dtype']!r}")
    return config


def read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        pickle = next((file for file in sorted(path.parent.iterdir()) if file.suffix in PICKLES), None)
        raise pickled(pickle) if pickle else LinvitError(f"{path} is missing")
    try:
        return safetensors.torch.load_file(path)
    except SafetensorError as error:
        raise LinvitError(f"{path} is damaged: {error}; copy or save it again") from None


def pickled(path: Path) -> LinvitError:
    return LinvitError(
        f"{path} is a pickle, which may run code when read: build its model, read the weights with "
        f"linvit.load_weights(model, '{path}'), and save that with linvit.save"
    )


def write_folder(folder: Path, files: Mapping[str, Callable[[str], object]]) -> None:
    """Write the files, each beside its place and synced, and move them in when all are there.

    The last of the old files goes before the first new one comes, so that a folder never mixes two saves.
    """
    if folder.is_file():
        raise LinvitError(f"{folder} is a file: give a folder")
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as beside:
            for name, write in files.items():
                path = os.path.join(beside, name)
                write(path)
                os.chmod(path, 0o666 & ~umask())  # safetensors' files are for their owner only
                sync(path)
            (folder / list(files)[-1]).unlink(missing_ok=True)
            for name in files:
                os.replace(os.path.join(beside, name), folder / name)
        sync(str(folder))
    except BaseException as error:
        if made and folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
        if isinstance(error, OSError | SafetensorError):
            raise LinvitError(f"cannot write {folder}: {error}") from error
        raise


def umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sync(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
