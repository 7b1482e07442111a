"""What linvit can convert of all that timm registers: one row per architecture family, each proved by running it.

A family is a timm module, its example the smallest model of it that has attention. It counts as converted only when the
converted example gives a finite output and finite gradients at two image sizes, the second one larger and not square.
"""

import inspect
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import nn

from linvit.conversion.convert import convert, droppable, find_hosts, own_size
from linvit.conversion.hosts import host_for
from linvit.conversion.plan import Choice, Plan
from linvit.errors import LinvitError

SIZES = (
    *("test", "femto", "atto", "pico", "nano", "xxs", "xx_small", "xs", "xsmall", "xtiny", "mini", "tiny", "_t", "_s"),
    *("small", "lite", "light", "b0", "m0", "0", "1", "2", "base"),
)
ATTENTION = re.compile(r"Attention|Attn|MLA|XCA|GPSA|SHSA|MHSA|MQA")
NOT_TOKENS = re.compile(
    r"Pool|^Cbam|^(Light)?(Channel|Spatial)Attn|SelectiveKernel|SplitAttn|LargeKernel|Conv2dAttn|Block"
)
SMALL_SIDE = 224  # what is meant for larger pictures is proved at this size where it can be built for it
BUILDS: tuple[dict[str, Any], ...] = (
    {"strict_img_size": False},
    {"dynamic_img_size": True, "dynamic_img_pad": True},
    {"dynamic_img_size": True},
    {},
)
# Attention modules of timm that no host stands for, with the reason.
REFUSED: dict[str, str] = {
    "BatNonLocalAttn": "bilinear transforms of the picture, not queries and keys",
    "BilinearAttnTransform": "bilinear transforms of the picture, not queries and keys",
    "BottleneckAttn": "its position logits are built for one picture size and depend on the query",
    "ChannelAttention": "channels attend to channels, so it is linear in the tokens already",
    "ChannelAttentionV2": "channels attend to channels, so it is linear in the tokens already",
    "ConvAttention": "a grouped convolution under the name of attention: it has no queries and keys",
    "CoordAttn": "a gate from row and column means: it has no queries and keys",
    "EfficientAdditiveAttention": "one global query gates the keys: it is linear already and has no values",
    "EfficientLocalAttn": "a gate from row and column means: it has no queries and keys",
    "FocalModulation": "context comes from convolutions: it has no keys",
    "HaloAttn": "each block of queries sees a larger, overlapping block of keys: it is linear in the tokens already",
    "HSMSSD": "a state-space layer: it has no queries and keys, and is linear already",
    "LambdaLayer": "keys and values become one linear map for all queries, so it is linear already",
    "LinearSelfAttention": "one score per token and one context vector for all: it is linear already, without queries",
    "MultiQueryAttentionV2": "no registered model uses it",
    "MultiScaleAttentionPoolFirst": "no registered model uses it",
    "NonLocalAttn": "no registered model uses it",
    "OutlookAttention": "it predicts its weights over 3×3 neighbours from the centre alone: it has no keys",
    "SimpleCoordAttn": "a gate from row and column means: it has no queries and keys",
    "SpatialAttention": "a gate from convolutions: it has no queries and keys",
    "StripAttn": "a gate from strip convolutions: it has no queries and keys",
}


@dataclass(frozen=True)
class FamilyResult:
    """One family: `status` is converted, partly or refused."""

    family: str
    example: str
    status: str
    reason: str = ""


def families() -> list[str]:
    """timm's own modules."""
    return [name for name in timm.list_modules() if f"timm.models.{name}" in sys.modules]


def speaks_of_attention(family: str) -> bool:
    """Whether a module's source speaks of attention; others may still build on another module's blocks."""
    return bool(re.search(r"Attention|Attn|XCA|GPSA|MLA|mqa_", inspect.getsource(sys.modules[f"timm.models.{family}"])))


def survey(only: list[str] | None = None) -> Iterator[FamilyResult]:
    """A row for each family with attention over tokens; families that turn out to have none are left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family in only or families():
            example = smallest(family)
            if example is not None:
                yield examine(family, example)


def smallest(family: str) -> str | None:
    """The smallest model of a family that has attention, judged by its name and then by its parameters."""

    def rank(name: str) -> tuple[int, int, str]:
        sizes = [i for i, word in enumerate(SIZES) if word in name.removeprefix(family)]
        return (min(sizes, default=len(SIZES)), len(name), name)

    found: list[tuple[int, str]] = []
    names = sorted(timm.list_models(module=family), key=rank)
    tries = 16 if speaks_of_attention(family) else 2
    for name in names[:tries] + [name for name in names[tries:] if "hybrid" in name][:2]:
        try:
            with torch.device("meta"):
                model = timm.create_model(name)
        except Exception:  # a model that timm cannot build on the meta device is no example
            continue
        if attention_modules(model):
            found.append((sum(p.numel() for p in model.parameters()), name))
        if len(found) == 3:
            break
    return min(found)[1] if found else None


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The innermost modules that attend over tokens, converted or not."""
    found = {name: m for name, m in model.named_modules() if host_for(m) is not None or attends(m)}
    outer = {name.rsplit(".", i)[0] for name in found for i in range(1, name.count(".") + 1)}
    return [module for name, module in found.items() if name not in outer or host_for(module) is not None]


def attends(module: nn.Module) -> bool:
    name = type(module).__name__
    return bool(ATTENTION.search(name)) and not NOT_TOKENS.search(name) and any(True for _ in module.parameters())


def examine(family: str, example: str) -> FamilyResult:
    """Convert the example to SteLLA and run it; whatever goes wrong becomes the row's reason."""
    try:
        model = build_example(example)
        left = sorted({type(m).__name__ for m in attention_modules(model) if host_for(m) is None})
        why = "; ".join(f"{name}: {REFUSED.get(name, 'no host yet')}" for name in left)
        if not find_hosts(model):
            return FamilyResult(family, example, "refused", why or "no attention over tokens")
        features = linearise(model)
        size = own_size(model)
        prove(model, size)
        second = prove_second(model, example, (size[0] + 64, size[1] + 32), size)
    except LinvitError as error:
        return FamilyResult(family, example, "refused", str(error))
    except Exception as error:
        return FamilyResult(family, example, "refused", f"{type(error).__name__}: {error}".splitlines()[0])
    given_up = f"gives up {', '.join(features)}" if features else ""
    notes = "; ".join(note for note in (why, given_up, second) if note)
    return FamilyResult(family, example, "partly" if left else "converted", notes)


def build_example(example: str, **options: Any) -> nn.Module:
    """The model, able to take other image sizes where timm offers that, and not larger than it needs to be."""
    for more in BUILDS:
        try:
            model = timm.create_model(example, **{**more, **options}).eval()
        except TypeError:
            continue
        if max(own_size(model)) > 256 and "img_size" not in options:
            with suppress(Exception):
                small: Any = timm.create_model(example, **{**more, "img_size": SMALL_SIDE}).eval()
                small.pretrained_cfg = {**small.pretrained_cfg, "input_size": (3, SMALL_SIDE, SMALL_SIDE)}
                return small
        return model
    raise LinvitError(f"timm cannot build {example} with {options}")


def linearise(model: nn.Module) -> list[str]:
    """Convert to SteLLA, giving up whatever it cannot honour; the features given up."""
    report = convert(model, Plan("stella", Choice("stella"), drop=tuple(sorted(droppable(model)))))
    return sorted({feature for layer in report.layers for feature in layer.dropped})


def prove(model: nn.Module, size: tuple[int, int]) -> None:
    """A forward and a backward pass, finite. Random weights without BatchNorm's own statistics can grow without bound,
    so what is not finite in evaluation mode gets a second chance in training mode."""
    if not finite(model.eval(), 1, size) and not finite(model.train(), 2, size):
        raise LinvitError(f"the converted model is not finite at {size[0]}×{size[1]}")
    model.eval()


def finite(model: nn.Module, batch: int, size: tuple[int, int]) -> bool:
    torch.manual_seed(0)
    out = model(torch.randn(batch, 3, *size))
    out = out[0] if isinstance(out, list | tuple) else out
    out.square().mean().backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return bool(grads) and bool(out.isfinite().all()) and all(bool(g.isfinite().all()) for g in grads)


def prove_second(model: nn.Module, example: str, other: tuple[int, int], size: tuple[int, int]) -> str:
    """The second size on the same model, or on one built for it where the architecture fixes its size."""
    try:
        prove(model, other)
        return ""
    except LinvitError:
        raise
    except Exception:
        pass
    for shape in (other, (size[0] + 64, size[0] + 64), (size[0] * 2, size[0] * 2)):
        try:
            model = build_example(example, img_size=shape)
            linearise(model)
            prove(model, shape)
            return f"another size by img_size={shape[0] if shape[0] == shape[1] else shape}"
        except Exception:
            continue
    raise LinvitError(f"the converted model runs at {size[0]}×{size[1]} only")
