"""Read a checkpoint without running what is in it.

A pickle can run any code when it is read. safetensors cannot; PyTorch's own files are read with `weights_only=True`,
which builds tensors and plain containers and refuses everything else.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError
from timm.models import load_state_dict
from torch import Tensor, nn

from linvit.conversion.host import Host
from linvit.errors import LinvitError

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".tar")


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
            raise unsafe(path) from error
        raise LinvitError(f"{path} is no checkpoint that linvit can read: give .safetensors") from error
    if not state or not all(isinstance(tensor, Tensor) for tensor in state.values()):
        raise LinvitError(f"{path} holds no plain list of weights: save model.state_dict() as safetensors")
    return cast(dict[str, torch.Tensor], state)


def unsafe(path: Path) -> LinvitError:
    """The refusal of a pickle that does more than hold tensors, or cannot be read as one that does not."""
    return LinvitError(
        f"{path} is a pickle that may run code when read, so linvit does not read it: where you trust it, "
        "save its state_dict with safetensors.torch.save_file and use that"
    )
