"""Models by name: a folder that linvit saved, or a timm model. Where its weights came from is noted on the model, so
that what is made of it can find its original again.

Checkpoints are read without running what is in them. A pickle can run any code when it is read. safetensors cannot;
PyTorch's own files are read with `weights_only=True`, which builds tensors and plain containers and refuses everything
else.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import timm
from safetensors import SafetensorError
from timm.models import load_state_dict
from torch import Tensor, nn

from linvit.conversion.host import Host
from linvit.conversion.report import Conversion, Source
from linvit.conversion.saving import PICKLES, load
from linvit.errors import LinvitError, reason, unknown_model

PATIENCE = 5  # seconds that the hub has to answer


def open_model(
    name: str,
    *,
    pretrained: bool = True,
    args: Mapping[str, Any] | None = None,
    checkpoint: Path | None = None,
    what: str = "model",
    instead: str = "--no-pretrained",
) -> nn.Module:
    """The model with its weights: from a folder of ours, or from timm, pretrained or with a checkpoint's. `what` it is
    and `instead` of timm's weights what to give are said in errors."""
    if Path(name).is_dir():
        if args:
            raise LinvitError(f"{name} is a saved model, which is built as it was: leave out --model-arg")
        model = load(name)
        if checkpoint is not None:
            load_weights(model, checkpoint)
            del model.linvit_source
        return model
    fetched = pretrained and checkpoint is None
    model = create_model(name, fetched, dict(args or {}), what, instead)
    if checkpoint is not None:
        load_weights(model, checkpoint)
    file = "" if checkpoint is None else str(checkpoint.resolve())
    model.linvit_source = Source(name, dict(args or {}), fetched, file)  # type: ignore[assignment]
    return model


def create_model(name: str, pretrained: bool, args: dict[str, Any], what: str, instead: str) -> nn.Module:
    """timm's model; whatever keeps it from being built or fetched is one line."""
    if ":" not in name and not timm.is_model(name.split(".")[0]):
        raise unknown_model(what, name, timm.list_models())
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


@contextmanager
def no_waiting_for_the_hub() -> Iterator[None]:
    """The Hugging Face hub is asked once. Where it does not answer, what its cache holds is taken, and anything else is
    an error at once: left alone, it would be asked again and again, for a minute and in silence."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    offline = constants.HF_HUB_OFFLINE
    try:
        if not offline:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception:  # whatever the network makes of it
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    except OSError as error:
        if offline or not constants.HF_HUB_OFFLINE:
            raise
        raise ConnectionError("the Hugging Face hub cannot be reached and its cache does not hold them") from error
    finally:
        constants.HF_HUB_OFFLINE = offline


def open_original(converted: nn.Module, name: str) -> nn.Module:
    """The model that a converted one was made from, or one line that says why it is not to be had."""
    conversions: list[Conversion] = getattr(converted, "linvit_conversions", [])
    if not conversions:
        hint = "give --plan to learn from the original, --teacher, or a recipe that needs none"
        raise LinvitError(f"the recipe learns from a teacher: {hint}")
    source = conversions[0].source or Source()
    if source.folder and Path(source.folder).is_dir():
        return load(source.folder)
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
