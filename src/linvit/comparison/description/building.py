"""From a candidate to its model.

Every candidate is the softmax model of the architecture, converted by the candidate's plan. So with one seed all of
them start from the same embedding, projections, MLPs and head, and only what a mechanism brings along is drawn anew,
from a stream of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import timm
import torch
from torch import Tensor, nn

from linvit.attention.local import begin_at_zero
from linvit.comparison.description.candidates import plan_of
from linvit.comparison.results import Candidate, Structure
from linvit.conversion import Report, as_plan, convert, resample_patches
from linvit.conversion.convert import droppable, own_size
from linvit.conversion.host import Host
from linvit.errors import LinvitError, unknown
from linvit.models.pyramid import FairPyramid, init_weights

OWN_STREAM = 2**32  # added to the seed for what a mechanism brings along
NAMES = {"width": "embed_dim", "heads": "num_heads"}  # timm's words for ours


def build_model(structure: Structure, *, seed: int = 0) -> nn.Module:
    """A candidate to be trained from scratch."""
    model = build_softmax(
        structure.architecture,
        patch_size=structure.patch_size,
        size=structure.size,
        classes=structure.classes,
        seed=seed,
    )
    become(model, structure.candidate, size=structure.size, seed=seed)
    return model


def build_softmax(
    architecture: Mapping[str, Any],
    *,
    patch_size: int | None = None,
    size: int | None = None,
    classes: int = 1000,
    seed: int = 0,
) -> nn.Module:
    """The architecture with softmax attention; a patch or image size that is not given is its own."""
    name, args = timm_call(architecture)
    args["num_classes"] = classes
    if patch_size is not None:
        args["patch_size"] = patch_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = create(name, args, size)
    if size is not None:
        model.pretrained_cfg = model.default_cfg = {**(model.pretrained_cfg or {}), "input_size": (3, size, size)}
    return model


def timm_call(architecture: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The timm model of an architecture and its arguments."""
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in architecture.items()}
    name: str = settings.pop("model")
    if name == "fair":
        return "fair_pyramid_p4_sa", {NAMES.get(key, key): value for key, value in settings.items()}
    if name == "vit":
        if not settings.get("class_token", True):
            settings["global_pool"] = "avg"
        return "vit_tiny_patch16_224", {NAMES.get(key, key): value for key, value in settings.items()}
    if not timm.is_model(name):
        raise unknown("model", name, ["fair", "vit", *timm.list_models()])
    return name, settings


def create(name: str, args: dict[str, Any], size: int | None) -> Any:
    """timm's model, with the image size as an argument where it takes one: convolutional pyramids take any size."""
    reason = ""
    for given in [args] if size is None else [{**args, "img_size": size}, args]:
        try:
            model: Any = timm.create_model(name, **given)
        except TypeError as error:
            reason = reason or str(error)
            continue
        except (ValueError, AssertionError, RuntimeError) as error:
            raise LinvitError(f"{name} cannot be built with {given}: {error}") from None
        model.linvit_origin = {"name": name, "args": given}
        return model
    raise LinvitError(f"{name} cannot be built with {args}: {reason}")


def become(
    model: nn.Module,
    candidate: Candidate,
    *,
    size: int | None = None,
    seed: int = 0,
    calibrate: Iterable[Tensor] | None = None,
    keep: Sequence[int] | None = None,
    quiet: bool = False,
) -> Report:
    """Convert a softmax model to a candidate, in place; what its attention does and the mechanism cannot is given up.
    Quadratic layers to be measured are measured on the images of `calibrate`, unless `keep` says what came of it. With
    `quiet`, for a model that is trained already, local branches start at zero."""
    side = own_size(model) if size is None else (size, size)
    own = {name: value for name, value in candidate.options.items() if name not in ("keep", "layers", "where")}
    plan = plan_of(candidate) if keep is None else as_plan("mixa", keep=tuple(keep), **own)
    images = calibrate if candidate.measured and keep is None else None
    if images is not None:
        plan = as_plan("mixa", keep=candidate.options.get("keep", 6), **own)
    plan = replace(plan, drop=tuple(sorted({*plan.drop, *droppable(model)})))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(OWN_STREAM + seed)
        report = convert(model, plan, size=side, quiet=quiet, calibrate=images)
        if isinstance(model, FairPyramid):  # its initialisation reaches into the mechanisms it is built with
            for host in [module for module in model.modules() if isinstance(module, Host)]:
                host.mechanism.apply(init_weights)
                if quiet:
                    begin_at_zero(host.mechanism)
    return report


def student_of(
    teacher: nn.Module, structure: Structure, *, seed: int = 0, **measuring: Any
) -> tuple[nn.Module, Report]:
    """A copy of the teacher, at the structure's patch and image size, converted to the candidate."""
    student = copy.deepcopy(teacher)
    resize(student, structure.patch_size, structure.size)
    return student, become(student, structure.candidate, size=structure.size, seed=seed, quiet=True, **measuring)


def resize(model: nn.Module, patch_size: int | None, size: int) -> None:
    """Bring a model with weights to a patch and image size; nothing happens where it has both, or takes any size."""
    embed: Any = getattr(model, "patch_embed", None)
    patch: Any = getattr(embed, "patch_size", None)
    patch = patch if isinstance(patch, int | None) else patch[0]
    fixed = getattr(embed, "img_size", None)
    if patch_size in (None, patch) and (fixed is None or tuple(fixed) == (size, size)):
        return
    resample_patches(model, patch_size or patch, size)
