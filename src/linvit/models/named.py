"""The papers' named models are timm models: `timm.create_model(name)` builds them once `linvit` is imported.

Most are timm models with another mechanism: one line each, no second copy of an architecture. Every such entry builds
its timm base (any keyword argument of it is accepted, `features_only` too) and converts it by a plan. A softmax
checkpoint of the base loads into it with every shared weight in place. The others are the Fair Comparison's eighteen
rows: `fair_pyramid_p4_sa` is the pyramid on patches of four pixels with softmax attention, and so on; `fair_column_p14`
and `fair_column_p16` are the columns, softmax too.
"""

from collections.abc import Callable, Sequence
from typing import Any

import timm
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, get_pretrained_cfg, register_model
from timm.models.efficientvit_mit import DSConv, LiteMLA, MBConv, ResidualBlock
from torch import nn

from linvit.conversion import Plan, as_plan, convert
from linvit.conversion.plan import castling, mixa, mobile, qt
from linvit.errors import LinvitError
from linvit.models.pyramid import FairPyramid

TIMMS = ("pretrained_cfg", "pretrained_cfg_overlay", "cache_dir")  # arguments timm adds that shape no model
KEPT = ("input_size", "pool_size", "crop_pct", "interpolation", "mean", "std", "first_conv", "classifier")
MECHANISMS: dict[str, tuple[str, dict[str, Any]]] = {
    "sa": ("softmax", {}),
    "la": ("linformer", {"variant": "fair"}),
    "ea": ("efficient", {}),
    "pa": ("performer", {"variant": "fair"}),
    "aa": ("fastformer", {"variant": "fair"}),
    "xca": ("xca", {"variant": "fair"}),
    "lpi": ("xca", {"variant": "fair", "lpi": True}),
}
WINDOWS = {4: 7, 7: 8}  # on patches of 7 pixels the last stage has 4×4 tokens, and the window shrinks to them
COLUMN: dict[str, Any] = {"embed_dim": 384, "depths": (12,), "num_heads": (12,)}
default_cfgs: dict[str, Any] = {}  # where timm looks for them
ON_BACKBONES: set[str] = set()  # of them detectors and segmenters, which are built on another model


def default_cfg(**overrides: Any) -> dict[str, Any]:
    """What timm wants to know about a model nobody has published weights for."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        **overrides,
    }


def add_model(
    name: str,
    build: Callable[..., nn.Module],
    cfg: dict[str, Any],
    instead: str = "build it with pretrained=False and train it",
    fetches: bool = False,
) -> None:
    """Register `name` with timm as a function of this module. `build` takes timm's keyword arguments, and `pretrained`
    too where it `fetches` weights of a part."""

    def entrypoint(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        if pretrained and not fetches:
            raise LinvitError(f"no weights are published for {name}: {instead}")
        model = build(name, **kwargs, **({"pretrained": pretrained} if fetches else {}))
        args = {key: value for key, value in kwargs.items() if key not in TIMMS}
        model.linvit_origin = {"name": name, "args": args}  # type: ignore[assignment]  # for linvit.save
        return model

    entrypoint.__name__ = entrypoint.__qualname__ = name
    default_cfgs[name] = cfg
    if fetches:
        ON_BACKBONES.add(name)
    globals()[name] = entrypoint
    register_model(entrypoint)


def list_models() -> list[str]:
    """Names of the classifiers this package registered with timm, sorted."""
    return sorted(name for name in default_cfgs if name not in ON_BACKBONES)


def derived(name: str, base: str, plan: Callable[..., Plan], options: Sequence[str] = (), **fixed: Any) -> None:
    """Register `name`: the timm model `base`, built with `fixed`, converted by `plan`.

    Keyword arguments of `timm.create_model` named in `options` go to the plan, the others to the base.
    """
    published = get_pretrained_cfg(base)
    cfg = default_cfg(**{key: getattr(published, key) for key in KEPT}) if published else default_cfg()

    def build(name: str, pretrained_cfg: Any = None, pretrained_cfg_overlay: Any = None, **kwargs: Any) -> nn.Module:
        chosen = plan(**{key: kwargs.pop(key) for key in options if key in kwargs})
        size = kwargs.get("img_size", 224)
        if base.startswith("efficientvit"):
            kwargs.pop("img_size", None)  # fully convolutional: only the learned positions have a size
        model = timm.create_model(base, **{**fixed, **kwargs})
        if base.startswith("efficientvit"):
            begin_as_released(model)
        convert(model, chosen, size=size, quiet=False)
        num_classes = kwargs.get("num_classes", cfg["num_classes"])
        named: Any = {**cfg, "architecture": name, "num_classes": num_classes}
        model.pretrained_cfg = model.default_cfg = named
        return model

    start = f"linvit.convert(timm.create_model('{base}', pretrained=True), …)"
    add_model(name, build, cfg, instead=f"start from softmax ones with {start}")


def begin_as_released(model: nn.Module) -> None:
    """The weights that EfficientViT's code, and so QT-ViT's, begins with: normal ones of 0.02, no bias, and residual
    branches that add nothing at first."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, ResidualBlock) and isinstance(module.shortcut, nn.Identity):
            last = {DSConv: "point_conv", MBConv: "point_conv", LiteMLA: "proj"}.get(type(module.main))
            if last is not None:
                nn.init.zeros_(getattr(module.main, last).norm.weight)


def with_options(plan: Callable[..., Plan], /, **preset: Any) -> Callable[..., Plan]:
    """The plan with some options set beforehand."""
    return lambda **options: plan(**{**preset, **options})


def add_fair(name: str, *, stages: int = 4, fixed_size: bool = False, **settings: Any) -> None:
    def build(name: str, **kwargs: Any) -> nn.Module:
        features = {"out_indices": tuple(range(stages)), "feature_cls": "getter"}
        return build_model_with_cfg(FairPyramid, name, False, feature_cfg=features, **{**settings, **kwargs})

    cfg = default_cfg(first_conv="patch_embed.proj", classifier="head.fc", fixed_input_size=fixed_size)
    add_model(name, build, cfg)


for number, size in enumerate(("b1", "b2", "b3", "l1", "l2", "l3"), start=1):
    derived(f"qtvit_{number}", f"efficientvit_{size}", qt, ("variant",))
    derived(f"qtvit_{number}_noape", f"efficientvit_{size}", with_options(qt, position=False), ("variant",))

ANY_SIZE: dict[str, Any] = {"dynamic_img_size": True, "dynamic_img_pad": True}
for size in ("tiny", "small"):
    deit, swin = f"deit_{size}_patch16_224", f"swin_{size}_patch4_window7_224"
    derived(f"mixa_deit_{size}_p14", deit, mixa, ("keep",), patch_size=14, **ANY_SIZE)
    derived(f"mixa_swin_{size}_w14", swin, mixa, ("keep",), window_size=14, strict_img_size=False)

MOBILE = ("variant", "small_head_dim")
for size in ("tiny", "small", "base"):
    derived(f"mobile_deit_{size}", f"deit_{size}_patch16_224", mobile, MOBILE, **ANY_SIZE)
for size in ("b0", "b2", "b3"):
    derived(f"mobile_pvt_v2_{size}", f"pvt_v2_{size}", mobile, MOBILE)
for size in ("s0", "s2", "l"):
    derived(f"mobile_efficientformerv2_{size}", f"efficientformerv2_{size}", mobile, MOBILE)
ABLATIONS: dict[str, dict[str, Any]] = {
    "vanilla": {"small_head_dim": None},
    "se": {"competition": False, "gate": "se"},
    "glu": {"competition": False, "gate": "glu"},
    "nocompete": {"competition": False},
}
for ablation, preset in ABLATIONS.items():
    derived(f"mobile_deit_small_{ablation}", "deit_small_patch16_224", with_options(mobile, **preset), **ANY_SIZE)
derived("hydra_deit_small", "deit_small_patch16_224", with_options(as_plan, plan="hydra"), **ANY_SIZE)

for size in ("tiny", "small", "base"):
    derived(f"castling_deit_{size}", f"deit_{size}_patch16_224", castling, ("sparse",), **ANY_SIZE)
    distilled = f"deit_{size}_distilled_patch16_224"
    derived(f"castling_deit_{size}_distilled", distilled, castling, ("sparse",), **ANY_SIZE)
    derived(f"castling_mvitv2_{size}", f"mvitv2_{size}", castling, ("sparse",))
for size in ("128", "192", "256", "384"):
    derived(f"castling_levit_{size}", f"levit_{size}", castling, ("sparse",))

for patch, window in WINDOWS.items():
    for short, (mechanism, options) in {**MECHANISMS, "window": ("window", {"window": window})}.items():
        settings: dict[str, Any] = {"patch_size": patch, "mechanism": mechanism, "options": options}
        add_fair(f"fair_pyramid_p{patch}_{short}", fixed_size=short == "la", **settings)
for patch in (14, 16):
    add_fair(f"fair_column_p{patch}", stages=1, patch_size=patch, **COLUMN)
