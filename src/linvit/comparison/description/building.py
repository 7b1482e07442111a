"""A candidate as it is written, `mixa:keep=2,where=last`, the plan it stands for, and its model.

A name is a plan's or a mechanism's; where both have it (castling, qt, mobile) the plan is meant, which is the paper's
whole attention. A plan's JSON file is a candidate as well.

Every candidate is the softmax model of the architecture, converted by the candidate's plan. So with one seed all of
them start from the same embedding, projections, MLPs and head, and only what a mechanism brings along is drawn anew,
from a stream of its own.
"""

import copy
import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

from linvit.attention.local import begin_at_zero
from linvit.comparison.description.dense import build_dense
from linvit.comparison.results import Candidate, Structure
from linvit.conversion import Plan, Report, as_plan, convert, droppable, parse_plan, resample_patches
from linvit.conversion.host import Host
from linvit.conversion.plan import Auto, split_options
from linvit.errors import LinvitError, unknown
from linvit.models.dense import DenseModel
from linvit.models.pyramid import FairPyramid, init_weights
from linvit.training.objectives.dense import body

OWN_STREAM = 2**32  # added to the seed for what a mechanism brings along
TIMM = {"fair": "fair_pyramid_p4_sa", "vit": "vit_tiny_patch16_224"}  # what our own architectures are made of
NAMES = {"width": "embed_dim", "heads": "num_heads"}  # timm's words for ours


def read_candidate(text: str) -> Candidate:
    """The candidate that is written so; its mechanisms must take the options it gives them."""
    name, options = split_options(text)
    found = Candidate(name, options)
    if name.endswith(".json"):
        found = Candidate(Path(name).stem, {}, parse_plan(text).to_dict())
    plan_of(found)
    return found


def plan_of(candidate: Candidate) -> Plan:
    """The plan that makes a softmax model this candidate. Layers that are to be measured stand first here: which ones
    they are, only the trained model and its images tell."""
    if candidate.plan is not None:
        return Plan.from_dict(candidate.plan)
    options = {name: value for name, value in candidate.options.items() if not candidate.measured or name != "layers"}
    made = as_plan(candidate.name, **options)
    if isinstance(made, Auto):
        raise LinvitError(
            "auto is another plan on every machine: compare one that `linvit plan MODEL -o FILE.json` wrote"
        )
    return made


def name_of(candidate: Candidate) -> str:
    """The candidate as it is written, always in the same way."""
    texts = {k: v if isinstance(v, str) else json.dumps(v, separators=(",", ":")) for k, v in candidate.options.items()}
    return ":".join(filter(None, (candidate.name, ",".join(f"{name}={texts[name]}" for name in sorted(texts)))))


def build_model(structure: Structure, *, seed: int = 0, trunk: nn.Module | None = None) -> nn.Module:
    """A candidate to be trained from scratch; a detector's or segmenter's trunk may have a classifier's weights."""
    model: Any = build_softmax(structure, seed=seed)
    if trunk is not None:
        model.backbone.load_trunk(trunk)
    become(model, plan_of(structure.candidate), structure.size, seed)
    return model


def build_softmax(structure: Structure, *, seed: int = 0) -> nn.Module:
    """The structure's architecture with softmax attention; a patch size that is not given is its own."""
    if structure.head:
        return build_dense(structure, seed=seed)
    args: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in structure.architecture.items()}
    name: str = args.pop("model")
    if name in TIMM:
        if not args.get("class_token", True):
            args["global_pool"] = "avg"
        name, args = TIMM[name], {NAMES.get(key, key): value for key, value in args.items()}
    elif not timm.is_model(name):
        raise unknown("model", name, [*TIMM, *timm.list_models()])
    args["num_classes"] = structure.classes
    if structure.patch_size is not None:
        args["patch_size"] = structure.patch_size
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = create(name, args, structure.size)
    input_size = (3, structure.size, structure.size)
    model.pretrained_cfg = model.default_cfg = {**(model.pretrained_cfg or {}), "input_size": input_size}
    return model


def create(name: str, args: dict[str, Any], size: int) -> Any:
    """timm's model, with the image size as an argument where it takes one: convolutional pyramids take any size."""
    reason = ""
    for given in ({**args, "img_size": size}, args):
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


def try_candidate(structure: Structure) -> str | None:
    """Why this model cannot be built or called, in one line; None if it can. Nothing is computed for it. Of detectors
    and segmenters the backbone is called, which is all that a candidate changes."""
    try:
        with torch.device("meta"):
            called = body(build_model(structure).eval())
            with torch.no_grad():
                called(torch.empty(1, 3, structure.size, structure.size))
    except (LinvitError, RuntimeError, AssertionError, ValueError, TypeError) as error:
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return None


def become(model: nn.Module, plan: Plan, size: int, seed: int, **options: Any) -> Report:
    """Convert a softmax model in place, with `options` of `convert`; what its attention does and the mechanism cannot
    is given up."""
    plan = replace(plan, drop=tuple(sorted({*plan.drop, *droppable(model)})))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(OWN_STREAM + seed)
        report = convert(model, plan, size=(size, size), **options)
        if any(
            isinstance(module, FairPyramid) for module in model.modules()
        ):  # its initialisation reaches into the mechanisms it is built with
            for host in [module for module in model.modules() if isinstance(module, Host)]:
                host.mechanism.apply(init_weights)
                if options.get("quiet"):
                    begin_at_zero(host.mechanism)
    return report


def student_of(
    teacher: nn.Module,
    structure: Structure,
    *,
    seed: int = 0,
    calibrate: Iterable[Tensor] | None = None,
    keep: Sequence[int] | None = None,
) -> tuple[nn.Module, Report]:
    """A copy of the teacher, at the structure's patch and image size, converted to the candidate; local branches start
    at zero. Quadratic layers to be measured are measured on the images of `calibrate`, unless `keep` says what came of
    it."""
    student, size = copy.deepcopy(teacher), structure.size
    resize(student, structure.patch_size, size)
    candidate, plan = structure.candidate, plan_of(structure.candidate)
    images = calibrate if candidate.measured and keep is None else None
    if images is not None or keep is not None:
        own = {name: value for name, value in candidate.options.items() if name not in ("keep", "layers", "where")}
        plan = as_plan("mixa", keep=candidate.options.get("keep", 6) if keep is None else tuple(keep), **own)
    return student, become(student, plan, size, seed, quiet=True, calibrate=images)


def resize(model: nn.Module, patch_size: int | None, size: int) -> None:
    """Bring a model with weights to a patch and image size; nothing happens where it has both, or takes any size, as
    detectors and segmenters do."""
    patch: Any = patch_of(model)
    fixed = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if patch_size not in (None, patch) or (fixed is not None and tuple(fixed) != (size, size)):
        resample_patches(model, patch_size or patch, size)


def patch_of(model: nn.Module) -> int | None:
    """The side of a model's patches, or of its trunk's, where it has some."""
    trunk: Any = model.backbone.trunk if isinstance(model, DenseModel) else model
    patch: Any = getattr(getattr(trunk, "patch_embed", None), "patch_size", None)
    return patch if isinstance(patch, int | None) else patch[0]
