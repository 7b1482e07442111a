"""A trained classifier's weights and mechanisms for the trunk of a backbone."""

import warnings
from collections.abc import Collection
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table
from torch import Tensor, nn

from linvit.conversion.convert import find_hosts
from linvit.conversion.rebuilding import inner, install_layers, saved_layers, size
from linvit.errors import LinvitError

TOKENS = ("cls_token", "reg_token", "dist_token")


def load_trunk(trunk: nn.Module, model: nn.Module, unused: Collection[str]) -> None:
    """Give a trunk the weights of a model of its architecture, converted or not, and the mechanisms of its converted
    layers. `unused` are parameters that the trunk was left without. Nothing is touched before everything fits."""
    source = inner(getattr(model, "_orig_mod", model))
    source = getattr(getattr(source, "backbone", source), "trunk", source)
    hosts = dict(find_hosts(trunk))
    layers = [layer for layer in saved_layers(source) if layer.name in hosts]
    replaced = tuple(f"{name}.mechanism." for name in hosts)
    lost = tuple(f"{layer.name}." for layer in layers if layer.dropped)
    state, own = source.state_dict(), trunk.state_dict()
    missing = [key for key in own if key not in state and not key.startswith((*replaced, *lost))]
    extra = [key for key in state if key not in own and not key.startswith(replaced) and not is_left_out(key, unused)]
    extra = [key for key in extra if not key.startswith(classifiers(source)) and not is_taken_out(key, trunk)]
    if missing or extra:
        trouble = f"it has no {missing[0]}" if missing else f"it has {extra[0]}, which the backbone lacks"
        raise LinvitError(f"this {type(source).__name__} is another architecture than the backbone: {trouble}")
    fitted = {key: fit(key, state[key], own[key], source, trunk) for key in own if key in state}
    install_layers(trunk, layers)
    brought = {key: tensor for key, tensor in state.items() if key.startswith(replaced)}
    now = trunk.state_dict()
    trunk.load_state_dict({key: tensor for key, tensor in (fitted | brought).items() if key in now}, strict=False)


def is_left_out(key: str, unused: Collection[str]) -> bool:
    """Whether a tensor belongs to what no map depends on; a norm's statistics go with its weights."""
    return key in unused or key.rpartition(".")[0] in {name.rpartition(".")[0] for name in unused if "." in name}


def is_taken_out(key: str, trunk: nn.Module) -> bool:
    """Whether this is a class, distillation or register token, which an adapter's trunk goes without."""
    return key in TOKENS and getattr(trunk, key, None) is None


def classifiers(source: Any) -> tuple[str, ...]:
    """How the names of the classifier's parameters begin, of which a trunk may never have known: timm builds DINOv2 and
    EVA-02 without one. Distilled models have two."""
    found = source.get_classifier() if hasattr(source, "get_classifier") else ()
    kept = found if isinstance(found, tuple) else (found,)
    return tuple(f"{name}." for name, module in source.named_modules() if name and any(module is k for k in kept))


def fit(key: str, tensor: Tensor, own: Tensor, source: Any, trunk: Any) -> Tensor:
    """A tensor of the source as the trunk has it. Tables of positions and of relative biases are resampled."""
    if key == "pos_embed" and tensor.ndim == 3 and grid_of(source) and grid_of(trunk):
        skipped, kept = prefix(source), prefix(trunk)
        table = resample_abs_pos_embed(tensor[:, skipped:], list(grid_of(trunk)), list(grid_of(source)), 0)
        if skipped >= kept:
            tensor = torch.cat((tensor[:, :kept], table), dim=1)
    elif key.endswith("relative_position_bias_table") and tensor.shape != own.shape:
        window = trunk.get_submodule(key.rpartition(".")[0]).window_size
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="timm.layers")  # how it indexes is not the user's matter
            tensor = resize_rel_pos_bias_table(tensor, new_window_size=window, new_bias_shape=tuple(own.shape))
    if tensor.shape != own.shape:
        here, there = size(tuple(own.shape)), size(tuple(tensor.shape))
        raise LinvitError(f"the weights do not fit the backbone: {key} is {there}, and {here} there")
    return tensor


def grid_of(model: Any) -> tuple[int, int]:
    """The grid that a table of positions is laid out for, where there is one."""
    found: Any = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    return tuple(found or getattr(model, "tokens_spatial_shape", ()))  # the second is Hiera's


def prefix(model: Any) -> int:
    """How many class and register tokens have a place in the table of positions."""
    return 0 if getattr(model, "no_embed_class", False) else getattr(model, "num_prefix_tokens", 0)
