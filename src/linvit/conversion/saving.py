"""Save and load: the weights as safetensors, and beside them a config that says how to build the model around them.

The config holds the model's timm name and arguments, and for each converted layer its mechanism as built. So loading
needs neither the softmax original nor its weights, and does not probe or choose again.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import safetensors.torch
import torch
from safetensors import SafetensorError
from timm.data import resolve_model_data_config
from torch import Tensor, nn

from linvit.attention import Count, Number, Range
from linvit.codec import convert, from_plain, to_plain
from linvit.conversion.convert import own_size
from linvit.conversion.hub.fetching import CONFIG, PREFIXES, PROCESSOR, WEIGHTS, fetch_model, repository
from linvit.conversion.rebuilding import SavedLayer, hugging, inner, install_layers, origin, rebuild, saved_layers
from linvit.conversion.report import Conversion, Source
from linvit.errors import LinvitError
from linvit.files import place, to_json, write_folder
from linvit.version import __version__

FORMAT = 1
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".tar")
MODEL_TYPE = "linvit"
Share = Annotated[float, Range(1e-3, 1e3)]
PREPROCESSING = {
    "input_size": tuple[Count, Count, Count],
    "interpolation": Literal["bilinear", "bicubic", "nearest", "lanczos", "random"],
    "mean": tuple[Number, ...],
    "std": tuple[Share, ...],
    "crop_pct": Share,
    "crop_mode": Literal["center", "squash", "border"],
}
LOADING = {"pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"}


@dataclass(frozen=True, kw_only=True)
class SavedConfig:
    """What `config.json` holds. Fields that another version of linvit wrote beside these are passed over."""

    format: int = FORMAT
    linvit: str = __version__
    model_type: str = field(default="", metadata={"sparse": True})  # by which transformers' Auto classes know it
    model: str
    args: dict[str, Any]
    dtype: str
    preprocessing: dict[str, Any]
    classes: tuple[str, ...] = field(default=(), metadata={"sparse": True})
    held_out_of: int | None = field(default=None, metadata={"sparse": True})
    conversions: tuple[dict[str, Any], ...]
    layers: tuple[SavedLayer, ...]


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
    folder = place(folder)
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    name, args = origin(model, model_name, model_args)
    config = SavedConfig(
        model_type=MODEL_TYPE if hugging(model) else "",
        model=name,
        args=args,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        preprocessing=preprocessing(model),
        classes=label_names(model),
        held_out_of=noted(model).get("held_out_of") or None,
        conversions=tuple(done.to_dict() for done in getattr(model, "linvit_conversions", [])),
        layers=tuple(saved_layers(model)),
    )
    try:
        text = json.dumps(to_plain(config), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise LinvitError(f"an argument of the model or an option of its layers cannot be saved: {error}") from None
    state = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in model.state_dict().items()}
    files: dict[str, Callable[[str], object]] = {WEIGHTS: partial(write_weights, state)}
    if (processor := getattr(model, "linvit_processor", None)) is not None:
        files[PROCESSOR] = partial(write_text, to_json(processor))
    write_folder(folder, {**files, CONFIG: partial(write_text, text)})


def write_text(content: str, path: str) -> None:
    Path(path).write_text(content, encoding="utf-8")


def write_weights(state: dict[str, Tensor], path: str) -> None:
    try:
        safetensors.torch.save_file(state, path, {"format": "pt"})
    except SafetensorError as error:  # a full disk too
        raise OSError(str(error)) from error


def load(folder: str | Path, *, device: str | torch.device = "cpu", revision: str | None = None) -> nn.Module:
    """The model saved in a folder, or at a `revision` of a model on the Hugging Face hub, `hf-hub:user/name`, in
    evaluation mode."""
    found = repository(folder, revision) if isinstance(folder, str) and folder.startswith(PREFIXES) else None
    if found is None and revision is not None:
        raise LinvitError(f"a folder has no revisions: leave out revision='{revision}', or give hf-hub:user/name")
    folder = Path(folder) if found is None else fetch_model(found)
    config = read_config(folder)
    state = read_weights(folder / WEIGHTS)
    model = rebuild(config.model, config.args)
    install_layers(model, config.layers)
    model.to(getattr(torch, config.dtype))
    own = model.state_dict(keep_vars=True)
    wrong = next((key for key in sorted(own.keys() | state.keys()) if shape(own, key) != shape(state, key)), None)
    if wrong:
        raise LinvitError(f"{folder}: the weights do not fit the config, beginning with {wrong}: save the model again")
    for key, tensor in own.items():
        tensor.data = tensor.data.to(state[key].dtype)
    model.load_state_dict(state)
    model.linvit_origin = {"name": config.model, "args": config.args}  # type: ignore[assignment]
    source = Source(folder=str(folder.resolve())) if found is None else Source(str(found), {}, True)
    model.linvit_source = source  # type: ignore[assignment]
    model.linvit_conversions = [Conversion.from_dict(done) for done in config.conversions]  # type: ignore[assignment]
    if not hugging(model) or len(config.preprocessing) > 1:
        note(model, **config.preprocessing)
    if (folder / PROCESSOR).is_file():
        model.linvit_processor = json.loads((folder / PROCESSOR).read_text(encoding="utf-8"))
    if config.classes:
        note(model, label_names=config.classes)
    if config.held_out_of:
        note(model, held_out_of=config.held_out_of)
    return model.to(device).eval()


def preprocessing(model: nn.Module) -> dict[str, Any]:
    """What happens to a picture before the model sees it, as timm's data config, at the model's present input size."""
    if hugging(model):  # what its image processor says, or what it was trained with here
        known = {name: noted(model)[name] for name in PREPROCESSING if name in noted(model)}
        return {**known, "input_size": (3, *own_size(model))}
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


def read_config(folder: Path) -> SavedConfig:
    """The checked config of a saved model."""
    if folder.is_file():
        if folder.suffix in PICKLES:
            raise pickled(folder)
        raise LinvitError(f"{folder} is a file: give the folder that linvit.save wrote")
    if not folder.is_dir():
        raise LinvitError(f"there is no folder {folder}")
    path = folder / CONFIG
    if not path.is_file():
        refuse_pickles(folder)
        models = [str(folder / name) for name in ("best", "last") if (folder / name / CONFIG).is_file()]
        why = f"the models of this run are {' and '.join(models)}" if models else "linvit.save did not write it"
        raise LinvitError(f"{folder} holds no {CONFIG}: {why}")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise LinvitError(f"{path} is damaged: {error}") from None
    version = data.get("format") if isinstance(data, dict) else None
    if type(version) is not int or "linvit" not in data:
        raise LinvitError(f"{path} is not one that linvit.save wrote")
    if version > FORMAT:
        raise LinvitError(
            f"{path} has format {version}, written by linvit {data['linvit']}; this one reads up to {FORMAT}: upgrade"
        )
    config = from_plain(SavedConfig, data, str(path), ignore=True)
    if asked := LOADING & {*names_in(config.args)}:
        raise LinvitError(f"{path} asks for other weights than its own by '{min(asked)}'")
    for name, value in config.preprocessing.items():
        convert(value, PREPROCESSING.get(name, Any), f"{name} of {path}")
    if not isinstance(getattr(torch, config.dtype, None), torch.dtype):
        raise LinvitError(f"dtype of {path} must be one of PyTorch's, got '{config.dtype}'")
    return config


def names_in(args: Any) -> Iterator[str]:
    """The names of arguments, and of those that are passed on inside them."""
    for name, value in args.items() if isinstance(args, Mapping) else ():
        yield name
        yield from names_in(value)


def read_weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        refuse_pickles(path.parent)
        raise LinvitError(f"{path} is missing")
    try:
        return safetensors.torch.load_file(path)
    except SafetensorError as error:
        raise LinvitError(f"{path} is damaged: {error}; copy or save it again") from None


def refuse_pickles(folder: Path) -> None:
    for file in sorted(folder.iterdir()):
        if file.suffix in PICKLES:
            raise pickled(file)


def pickled(path: Path) -> LinvitError:
    return LinvitError(
        f"{path} is a pickle, which may run code when read: build its model, read the weights with "
        f"linvit.load_weights(model, '{path}'), and save that with linvit.save"
    )
