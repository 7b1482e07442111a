"""How to build a model again from its name: what `linvit.save` writes down and `linvit.load` reads.

timm does not keep the arguments that built a model. Named models of linvit note theirs; for others the common ones are
read off the model. Either way the model is built once more on the meta device and compared, names, shapes and settings,
so that a saved model is known to load.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.models import is_model, list_models
from torch import nn

from linvit.attention import TokenGrid
from linvit.codec import to_plain
from linvit.conversion.convert import Step, build_mechanism, find_hosts, install, names_to_drop
from linvit.conversion.dry_run import image_part
from linvit.conversion.enclosure import enclosed
from linvit.conversion.host import Host
from linvit.conversion.plan import Choice
from linvit.errors import LinvitError, reason, unknown

# Settings that matter in training only, or that the machine decides: a rebuilt model may differ in them. Swin's blocks
# note the shift they were first built with; what counts is shift_size.
PASSING = {"training", "distilled_training", "grad_checkpointing", "p", "drop_prob", "drop_rate", "scale_by_keep"}
PASSING |= {"fused_attn", "impl", "target_shift_size", "name_or_path"}
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class SavedLayer:
    """The mechanism of one converted layer, as it was built."""

    name: str
    mechanism: str
    options: dict[str, Any]
    grid: tuple[int, int, int] | None  # height, width and prefix
    dropped: tuple[str, ...]


def rebuild(name: str, args: Mapping[str, Any]) -> nn.Module:
    """A model by its name and arguments, without its weights, and without network and other files."""
    with enclosed(name):
        return build(name, args)


def build(name: str, args: Mapping[str, Any]) -> nn.Module:
    if name.startswith("transformers:"):
        try:
            from linvit.conversion.huggingface import PREFIX, from_config
        except ImportError:
            raise LinvitError("this is a Hugging Face model: pip install linvit[transformers]") from None
        return from_config(name.removeprefix(PREFIX), dict(args))
    if not is_model(name):
        raise unknown("model", name, list_models())
    try:
        return timm.create_model(name, pretrained=False, **args)
    except LinvitError:
        raise
    except Exception as error:  # whatever the model's constructor makes of its arguments
        raise LinvitError(f"{name} cannot be built with {dict(args)}: {reason(error)}") from error


def saved_layers(model: nn.Module) -> Iterator[SavedLayer]:
    """The converted layers of a model."""
    for name, module in find_hosts(model):
        if isinstance(module, Host):
            mechanism, grid = module.mechanism, module.mechanism.shape.grid
            places = None if grid is None else (grid.height, grid.width, grid.prefix)
            yield SavedLayer(name, mechanism.name, mechanism.options, places, module.given_up)


def layers_of(model: nn.Module) -> list[dict[str, Any]]:
    """Which converted layer has which mechanism, as plain data."""
    return [to_plain(layer) for layer in saved_layers(model)]


def install_layers(model: nn.Module, layers: Iterable[SavedLayer]) -> None:
    """Give a freshly built model the mechanisms that another one had."""
    found = dict(find_hosts(model))
    steps = []
    for layer in layers:
        if layer.name not in found:
            raise LinvitError(f"the config names the layer {layer.name}, which {type(model).__name__} does not have")
        module, choice = found[layer.name], Choice(layer.mechanism, layer.options)
        grid = None if layer.grid is None else TokenGrid(*layer.grid)
        mechanism = build_mechanism(module, choice, grid, "auto")
        steps.append(Step(layer.name, module, choice, mechanism, names_to_drop(layer.dropped)))
    install(model, steps)


def origin(
    model: nn.Module, name: str | None = None, args: Mapping[str, Any] | None = None
) -> tuple[str, dict[str, Any]]:
    """The name and the arguments that build this model; an error where they cannot be told."""
    layers = list(saved_layers(model))
    hint = "it was changed after it was built"
    with torch.device("meta"):
        if hugging(model):
            from linvit.conversion.huggingface import origin_of

            name, found = origin_of(model)  # type: ignore[arg-type]
            again = rebuild(name, found)
        else:
            noted = getattr(model, "linvit_origin", {})
            name = name or noted.get("name") or (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
            if not name:
                kind = type(model).__name__
                raise LinvitError(f"this {kind} has no timm name: give model_name='…' and model_args={{…}}")
            known = {**(noted.get("args", {}) if name == noted.get("name") else {}), **(args or {})}
            again = rebuild(name, known)
            found = {**known, **discover(model, again)}
            if found != known:
                again = rebuild(name, found)
            lacking = "'img_size': …" if "img_size" in parameters(inner(again)) - found.keys() else "…"
            hint = f"give model_args={{{lacking}}}"
        install_layers(again, layers)
    difference = next(differences(model, again), None)
    if difference:
        raise LinvitError(f"{name} built with {found} is not this model: {difference}; {hint}")
    return name, found


def parameters(model: nn.Module) -> set[str]:
    """What the constructor of a model takes, those of its base classes included."""
    return {parameter for cls in type(model).__mro__[:-1] for parameter in inspect.signature(cls).parameters}


def hugging(model: nn.Module) -> bool:
    """Whether the model is one of transformers'."""
    return any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__)


def inner(model: nn.Module) -> nn.Module:
    """The model inside timm's feature wrapper, else the model."""
    wrapped = getattr(model, "model", None)
    return wrapped if type(model).__module__ == "timm.models._features" and wrapped is not None else model


def single(size: Any) -> Any:
    """7 for (7, 7): not every model takes pairs. Lists are tuples: a config that was written down has no others."""
    if not isinstance(size, tuple | list):
        return size
    pair = len(size) == 2 and size[0] == size[1] and not isinstance(size[0], tuple | list)
    return size[0] if pair else tuple(single(part) for part in size)


def blocks(model: Any) -> list[Any]:
    return [block for layer in model.layers for block in layer.blocks]


READERS: dict[str, Callable[[Any], Any]] = {
    "num_classes": lambda model: model.num_classes,
    "in_chans": lambda model: model.in_chans,
    "global_pool": lambda model: model.global_pool,
    "img_size": lambda model: single(model.patch_embed.img_size),
    "patch_size": lambda model: single(model.patch_embed.patch_size),
    "window_size": lambda model: single(max(tuple(block.window_size) for block in blocks(model))),
    "depth": lambda model: len(model.blocks),
    "depths": lambda model: tuple(len(layer.blocks) for layer in model.layers),
    "embed_dim": lambda model: model.patch_embed.proj.out_channels,
    "num_heads": lambda model: heads(model),
    "class_token": lambda model: model.has_class_token,
    "reg_tokens": lambda model: model.num_reg_tokens,
    "no_embed_class": lambda model: model.no_embed_class,
    "dynamic_img_size": lambda model: model.dynamic_img_size,
    "dynamic_img_pad": lambda model: model.patch_embed.dynamic_img_pad,
    "strict_img_size": lambda model: model.patch_embed.strict_img_size,
}


def heads(model: Any) -> Any:
    if hasattr(model, "layers"):
        return tuple(layer.blocks[0].attn.num_heads for layer in model.layers)
    return model.blocks[0].attn.num_heads


def discover(model: nn.Module, built: nn.Module) -> dict[str, Any]:
    """Arguments by which the model differs from the one built without them, as far as they can be read off it. Those of
    a detector or a segmenter are noted when it is built."""
    found: dict[str, Any] = {}
    if image_part(model) is not model:
        return found
    if type(model).__module__ == "timm.models._features" and type(built) is not type(model):
        info: Any = model.feature_info
        found |= {"features_only": True, "out_indices": tuple(info.out_indices)}
    mine, theirs = inner(model), inner(built)
    taken = parameters(theirs)
    for argument, read in READERS.items():
        try:
            value, default = read(mine), read(theirs)
        except (AttributeError, IndexError, TypeError, ValueError):
            continue
        if argument in taken and plain(value) and value != default:
            found[argument] = value
    return found


def differences(model: nn.Module, again: nn.Module) -> Iterator[str]:
    """In words, where the rebuilt model is another: missing or extra tensors, shapes, plain settings of modules."""
    have, get = ({name: tuple(t.shape) for name, t in m.state_dict().items()} for m in (model, again))
    for name in sorted(have.keys() | get.keys()):
        if have.get(name) != get.get(name):
            yield f"{name} is {size(have.get(name))}, not {size(get.get(name))}"
    twins = dict(again.named_modules())
    for name, module in model.named_modules():
        twin = vars(twins[name]) if name in twins else {}
        for setting, value in vars(module).items():
            if setting in PASSING or setting.startswith(("_", "linvit_")) or setting not in twin:
                continue
            if plain(value) and plain(twin[setting]) and single(value) != single(twin[setting]):
                yield f"{name}{'.' if name else ''}{setting} is {value!r}, not {twin[setting]!r}"


def plain(value: Any) -> bool:
    return isinstance(value, PLAIN) or (isinstance(value, tuple | list) and all(map(plain, value)))


def size(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "×".join(map(str, shape)) or "a number"
