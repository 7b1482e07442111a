"""Models by name: a folder that linvit or transformers saved, a timm model, or a model of the Hugging Face hub. Where
its weights came from is noted on the model, so that what is made of it can find its original again.

Checkpoints are read without running what is in them. A pickle can run any code when it is read. safetensors cannot;
PyTorch's own files are read with `weights_only=True`, which builds tensors and plain containers and refuses everything
else.
"""

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import timm
from safetensors import SafetensorError
from timm.models import load_state_dict
from torch import Tensor, nn

from linvit.conversion.host import Host
from linvit.conversion.hub.fetching import fetch_model, kind_in, no_waiting_for_the_hub, repository
from linvit.conversion.report import Conversion, Source
from linvit.conversion.saving import PICKLES, load
from linvit.errors import LinvitError, reason, unknown_model


def open_model(
    name: str,
    *,
    pretrained: bool = True,
    args: Mapping[str, Any] | None = None,
    checkpoint: Path | None = None,
    what: str = "model",
    instead: str = "--no-pretrained",
) -> nn.Module:
    """The model with its weights: from a folder of ours or of transformers, from the hub, or from timm, pretrained or
    with a checkpoint's. `what` it is and `instead` of timm's weights what to give are said in errors."""
    fetched, args, on_hub = pretrained and checkpoint is None, dict(args or {}), None
    folder = Path(name)
    if not folder.is_dir() and not timm.is_model(name.split(".")[0]) and (on_hub := repository(name)) is not None:
        folder = fetch_model(on_hub, weights=fetched)
    if folder.is_dir() and kind_in(folder) != "timm":
        model = open_folder(folder, args, fetched)
        source = Source(folder=str(folder.resolve())) if on_hub is None else Source(str(on_hub), args, fetched)
        model.linvit_source = source  # type: ignore[assignment]
        if checkpoint is not None:
            load_weights(model, checkpoint)
            del model.linvit_source
        return model
    if folder.is_dir():
        name = f"local-dir:{folder.resolve()}" if on_hub is None else str(on_hub)
    model = create_model(name, fetched, args, what, instead)
    if checkpoint is not None:
        load_weights(model, checkpoint)
    file = "" if checkpoint is None else str(checkpoint.resolve())
    model.linvit_source = Source(name, args, fetched, file)  # type: ignore[assignment]
    return model


def open_folder(folder: Path, args: dict[str, Any], weights: bool) -> nn.Module:
    """The model that linvit or transformers saved in a folder."""
    if kind_in(folder) == "transformers":
        try:
            from linvit.conversion.huggingface import open_folder as open_transformers
        except ImportError:
            raise LinvitError(f"{folder} is a Hugging Face model: pip install linvit[transformers]") from None
        return open_transformers(folder, args, weights=weights)
    if args:
        raise LinvitError(f"{folder} is a saved model, which is built as it was: leave out --model-arg")
    return load(folder)


def check_name(name: str, what: str = "model") -> None:
    """Raise where a name is no folder, none of timm's models and none that may be on the hub."""
    known = Path(name).is_dir() or ":" in name or timm.is_model(name.split(".")[0]) or repository(name) is not None
    if not known:
        raise unknown_model(what, name, timm.list_models())


def create_model(name: str, pretrained: bool, args: dict[str, Any], what: str, instead: str) -> nn.Module:
    """timm's model; whatever keeps it from being built or fetched is one line."""
    check_name(name, what)
    if pretrained:
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # it tells of every retry; one line comes at the end
        if sys.stderr.isatty():
            print(f"fetching the weights of {name}", file=sys.stderr)
    try:
        with no_waiting_for_the_hub() if pretrained else nullcontext():
            return timm.create_model(name, pretrained=pretrained, **args)
    except LinvitError:
        raise
    except Exception as error:  # whatever the hub, the network or the model's constructor makes of it
        if not pretrained:
            raise LinvitError(f"{name} cannot be built with {args}: {reason(error)}") from error
        why = reason(error).split(". ")[0]
        raise LinvitError(f"cannot get the pretrained weights of {name} ({why}); give {instead}") from error


def open_original(converted: nn.Module, name: str) -> nn.Module:
    """The model that a converted one was made from, or one line that says why it is not to be had."""
    conversions: list[Conversion] = getattr(converted, "linvit_conversions", [])
    if not conversions:
        hint = "give --plan to learn from the original, --teacher, or a recipe that needs none"
        raise LinvitError(f"the recipe learns from a teacher: {hint}")
    source = conversions[0].source or Source()
    if source.folder and Path(source.folder).is_dir():
        return open_folder(Path(source.folder), {}, True)
    checkpoint = Path(source.checkpoint) if source.checkpoint else None
    gone = source.folder or (source.checkpoint if checkpoint is not None and not checkpoint.is_file() else "")
    if gone:
        raise LinvitError(f"{name} was made from {gone}, which is gone: give --teacher")
    if not (source.pretrained or checkpoint):
        known = "random weights" if source.model else "a model that is not known"
        raise LinvitError(f"{name} was made from {known}: give --teacher")
    return open_model(source.model, args=source.args, checkpoint=checkpoint, what="teacher", instead="--teacher")


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Load a checkpoint (`.safetensors`, or PyTorch's own) into a model, converted or not.

    A checkpoint of the original fits the converted model: parameters that a mechanism brought keep their values, and
    those of dropped features are passed over. Everything else must match, or nothing is loaded.
    """
    state = read_state(path)
    own = model.state_dict()
    hosts = [(name, module) for name, module in model.named_modules() if isinstance(module, Host)]
    brought = {f"{name}.mechanism.{key}" for name, module in hosts for key in module.mechanism.state_dict()}
    gone = tuple(f"{name}." for name, module in hosts if module.given_up)
    missing = [name for name in own if name not in state and name not in brought]
    extra = [name for name in state if name not in own and not name.startswith(gone)]
    if missing or extra:
        trouble = f"has no {missing[0]}" if missing else f"has {extra[0]}, which the model lacks"
        others = len(missing) + len(extra) - 1
        raise LinvitError(
            f"{path} is a checkpoint of another model: it {trouble}" + (f" ({others} more)" * (others > 0))
        )
    for name, tensor in own.items():
        if name in state and state[name].shape != tensor.shape:
            here, there = (" × ".join(map(str, t.shape)) for t in (tensor, state[name]))
            raise LinvitError(f"{path} does not fit: its {name} is {there}, the model's {here}")
    model.load_state_dict({name: tensor for name, tensor in state.items() if name in own}, strict=False)


def read_state(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, unwrapped from what trainers put around them."""
    path = Path(path)
    if not path.is_file():
        raise LinvitError(f"there is no checkpoint {path}")
    try:
        state = load_state_dict(str(path))
    except SafetensorError as error:
        raise LinvitError(f"{path} is damaged or no safetensors file: {error}") from None
    except Exception as error:
        if "weights_only" in str(error) or path.suffix in PICKLES:
            raise LinvitError(
                f"{path} is a pickle that may run code when read, so linvit does not read it: where you trust it, "
                "save its state_dict with safetensors.torch.save_file and use that"
            ) from error
        raise LinvitError(f"{path} is no checkpoint that linvit can read: give .safetensors") from error
    if not state or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise LinvitError(f"{path} holds no plain list of weights: save model.state_dict() as safetensors")
    return cast(dict[str, Tensor], state)


def register_auto_classes() -> None:
    """Let transformers' Auto classes open what linvit saved: `AutoModelForImageClassification.from_pretrained(folder)`
    then gives what `linvit.load(folder)` does. Converting or opening a Hugging Face model does so too."""
    try:
        from linvit.conversion import huggingface  # noqa: F401
    except ImportError as error:
        raise LinvitError(f"transformers is missing or too old ({error}): pip install linvit[transformers]") from None
