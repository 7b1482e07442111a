"""The optimiser of a stage: which parameters it moves and which of them decay, how gradients are clipped, the
learning rate over the steps, and Muon.
"""

import math
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from timm.models import group_parameters
from timm.utils.agc import adaptive_clip_grad
from torch import Tensor, nn

from linvit.conversion.host import Host
from linvit.conversion.rebuilding import hugging
from linvit.errors import LinvitError
from linvit.training.config import Config, Stage

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of Muon's quintic: steep at zero, and close enough to one from there on
ITERATIONS = 5
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
TABLES = ("cls_token", "distillation_token", "mask_token", "position_embeddings")  # where a model does not say it
SHORTCUT = "shortcut.norm.weight"  # QT-ViT calls this norm bn and excludes by name, so that it decays


def select_trainable(model: nn.Module, which: str) -> dict[str, nn.Parameter]:
    """Let these parameters learn and no others: all, attention, mechanism, or a regular expression over their names."""
    chosen = named_by(model, which)
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in chosen)
    found = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not found:
        raise LinvitError(f"no parameter of the model is '{which}': nothing would learn")
    return found


def named_by(model: nn.Module, which: str) -> set[int]:
    """The parameters, by their ids, that a setting means."""
    if which in ("attention", "mechanism"):
        hosts = [module for module in model.modules() if isinstance(module, Host)]
        owners = [host if which == "attention" else host.mechanism for host in hosts]
        return {id(parameter) for owner in owners for parameter in owner.parameters()}
    pattern = re.compile("" if which == "all" else which)
    return {id(parameter) for name, parameter in model.named_parameters() if pattern.search(name)}


def check_trainable(model: nn.Module, config: Config) -> None:
    """Whether each stage has something to learn, and Muon a matrix to move: better known now than when it begins."""
    for stage in config.plan_of_stages():
        if named_by(model, stage.trainable):
            continue
        if stage.trainable in ("attention", "mechanism") and not any(isinstance(m, Host) for m in model.modules()):
            raise LinvitError(f"stage {stage.name} trains converted layers, and the model has none: give --plan")
        raise LinvitError(
            f"stage {stage.name}: no parameter of the model is '{stage.trainable}', so nothing would learn: "
            f"set stages.{stage.name}.trainable to what there is, or to all"
        )
    meant = named_by(model, config.muon) if config.optimiser == "muon" else None
    if meant is not None and not any(id(p) in meant and p.ndim == 2 for p in model.parameters()):
        raise LinvitError(f"muon={config.muon}: no matrix of the model is called so: set muon=all, or optimiser=adamw")


def decays(name: str, parameter: Tensor, rule: str, own: Iterable[str], norms: Container[int] = ()) -> bool:
    """Whether a parameter has weight decay. `own` are names that the model itself excludes, `norms` the ids of what
    belongs to its norms."""
    if rule == "nothing":
        return True
    if rule == "norm_and_bias":
        return name.endswith(SHORTCUT) or not ("norm" in name or "bias" in name or id(parameter) in norms)
    bias = name.rpartition(".")[2].startswith("bias")
    return parameter.ndim > 1 and not bias and not excluded(name, own)


def excluded(name: str, own: Iterable[str]) -> bool:
    return any(name == item or name.endswith("." + item) for item in own)


def make_optimiser(config: Config, model: nn.Module, trainable: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Fused, so that a step is one kernel, and one that the device itself can leave out when the loss was not finite. A
    group learns at `times` the rate."""
    own = (*(model.no_weight_decay() if hasattr(model, "no_weight_decay") else TABLES), "table")  # type: ignore[operator]
    norms = {id(p) for module in model.modules() if isinstance(module, NORMS) for p in module.parameters()}
    heads = classifier_names(model)
    matrices = named_by(model, config.muon) if config.optimiser == "muon" else set()
    added = named_by(model, "mechanism")
    shares = rate_shares(config, model)
    groups: dict[tuple[float, float, bool], dict[str, Any]] = {}
    for name, parameter in trainable.items():
        decay = config.weight_decay if decays(name, parameter, config.no_decay, own, norms) else 0.0
        table = excluded(name, own)  # of positions or relative biases: two-dimensional, and no linear map
        inner = id(parameter) in matrices and parameter.ndim == 2 and not table and not name.startswith(heads)
        times = config.muon_lr if inner else config.added_lr if id(parameter) in added else 1.0
        times *= shares.get(id(parameter), 1.0)
        group = groups.setdefault((decay, times, inner), {"params": [], "weight_decay": decay, "times": times})
        group["params"].append(parameter)
        if inner:
            group.setdefault("parts", []).append(matrices_in(name, parameter))
    given = list(groups.values())
    if config.optimiser == "sgd":
        return torch.optim.SGD(given, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0, fused=True)
    on_device = next(iter(trainable.values())).is_cuda  # then its step can be part of a CUDA graph
    kind = Muon if config.optimiser == "muon" else torch.optim.AdamW
    return kind(given, lr=config.lr, betas=config.betas, eps=config.eps, fused=True, capturable=on_device)


def rate_shares(config: Config, model: Any) -> dict[int, float]:
    """The share of the rate that parameters have by `trunk_lr` and `layer_decay`, by their ids. Layers are timm's: the
    stem, then block after block; what comes behind the trunk learns at the full rate."""
    trunk = getattr(getattr(model, "backbone", None), "trunk", None)
    shares = dict.fromkeys(map(id, trunk.parameters()), config.trunk_lr) if trunk is not None else {}
    if config.layer_decay is None:
        return shares
    trunk = model if trunk is None else trunk
    if not hasattr(trunk, "group_matcher"):
        raise LinvitError(f"timm does not say which layers {type(trunk).__name__} has: set layer_decay=none")
    layers = group_parameters(trunk, trunk.group_matcher(coarse=False), reverse=True)
    behind = max(layers.values()) + (trunk is not model)  # a classifier is timm's last group
    for name, parameter in trunk.named_parameters():
        if name in layers:
            share = config.layer_decay ** (behind - layers[name])
            shares[id(parameter)] = share * shares.get(id(parameter), 1.0)
    return shares


def clip(config: Config, trainable: dict[str, nn.Parameter], norm: Tensor) -> None:
    """Shorten gradients in place: their common norm to `clip_norm`, each number to `clip_value`, or each unit's by its
    weights' (AGC), the classifier's too, as LeViT and EfficientFormer train."""
    if config.clip_norm:
        torch.nn.utils.clip_grads_with_norm_(trainable.values(), config.clip_norm, norm)
    elif config.clip_value:
        torch.nn.utils.clip_grad_value_(trainable.values(), config.clip_value)
    elif config.clip_agc:
        adaptive_clip_grad(trainable.values(), config.clip_agc)


def classifier_names(model: nn.Module) -> tuple[str, ...]:
    """How the names of the classifier's parameters begin, as timm says; distilled models have two classifiers. Hugging
    Face calls it classifier."""
    usual = "classifier" if hugging(model) else ()
    found = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or usual
    return tuple(f"{name}." for name in ((found,) if isinstance(found, str) else found))


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a cosine, steps, a power or nothing, then a rest at the lowest. A plain function of the
    step, so that a resumed run needs no state to go on with it."""

    peak: float
    steps: int  # warm-up and cosine
    warmup: int = 0
    start: float = 0.0
    lowest: float = 0.0
    prefix: bool = False  # the cosine begins after the warm-up; else the warm-up hides its first part
    kind: str = "cosine"
    drops: tuple[int, ...] = ()  # of "step": when the rate falls to a tenth
    power: float = 1.0  # of "poly"

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return self.start + (self.peak - self.start) * step / self.warmup
        if self.kind == "constant":
            return self.peak if step < self.steps else self.lowest
        if self.kind == "step":
            return self.peak * 0.1 ** sum(step >= drop for drop in self.drops)
        done, whole = (step - self.warmup, self.steps - self.warmup) if self.prefix else (step, self.steps)
        if done >= whole:
            return self.lowest
        if self.kind == "poly":
            return self.lowest + (self.peak - self.lowest) * (1 - done / whole) ** self.power
        return self.lowest + (self.peak - self.lowest) * 0.5 * (1 + math.cos(math.pi * done / whole))


def stage_schedule(config: Config, stage: Stage, steps: int, epoch_steps: float) -> Schedule:
    """The schedule of a stage of so many steps. The cool-down belongs to a training of one stage; of several, each has
    its warm-up, of a fifth of its steps at most. A training that was cut down to few epochs warms up for half of them
    at most."""
    rest = 0 if config.stages else round(config.cooldown_epochs * epoch_steps)
    longest = steps // 5 if len(config.stages) > 1 else (steps - rest) // 2
    return Schedule(
        peak=config.scaled(config.lr if stage.lr is None else stage.lr),
        steps=steps - rest,
        warmup=min(round(config.warmup_epochs * epoch_steps), longest),
        start=config.warmup_lr,
        lowest=config.min_lr,
        prefix=config.warmup_prefix,
        kind=config.schedule,
        drops=tuple(round(share * (steps - rest)) for share in config.milestones),
        power=config.poly_power,
    )


def orthogonal(matrices: Tensor) -> Tensor:
    """Nearly the orthogonal factor of each wide matrix `(count, rows, columns)`, by Newton–Schulz iteration in their
    precision, which is bfloat16."""
    a, b, c = COEFFICIENTS
    x = matrices / matrices.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def directions(matrices: list[Tensor]) -> list[Tensor]:
    """The orthogonal factors of stacks of matrices `(count, rows, columns)`. Stacks of one shape go together, and so do
    those of its transpose: a step of a small model is as long as it has kernels."""
    wide = [stack.mT if stack.shape[-2] > stack.shape[-1] else stack for stack in matrices]
    shapes: dict[torch.Size, list[int]] = {}
    for index, stack in enumerate(wide):
        shapes.setdefault(stack.shape[1:], []).append(index)
    found: dict[int, Tensor] = {}
    for together in shapes.values():
        factors = orthogonal(torch.cat([wide[index].bfloat16() for index in together]))
        found |= zip(together, factors.split([len(wide[index]) for index in together]), strict=True)
    return [
        found[index].mT.contiguous() if stack.shape[-2] > stack.shape[-1] else found[index]
        for index, stack in enumerate(matrices)
    ]


def matrices_in(name: str, matrix: Tensor) -> int:
    """How many matrices a parameter holds, one below the other."""
    rows, columns = matrix.shape
    return 3 if "qkv" in name and rows == 3 * columns else 1


class Muon(torch.optim.AdamW):
    """Matrices move along the orthogonal factor of their momentum, all directions equally far; the rest by AdamW.
    Groups with `parts`, a count for each of their parameters, are such matrices.

    The hope is that a converted model has to change along many directions of which few have large gradients. The rate
    is matched to AdamW's (the root mean square of a move is that of AdamW's, 0.2 of the rate), so one rate serves both.
    torch has a Muon too; this one differs in what our engine needs. Matrices of one shape are handled in one go, a
    packed qkv as its three parts; nothing asks the host, so that a step can be recorded as a CUDA graph; and a step
    with `found_inf` leaves everything as it was.
    """

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float = 0.95, **adamw: Any) -> None:
        self.momentum = momentum
        super().__init__(groups, **adamw)

    def __setstate__(self, state: dict[str, Any]) -> None:
        torch.optim.Optimizer.__setstate__(self, state)  # AdamW's own asks every parameter for a step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        every = self.param_groups
        self.param_groups = [group for group in every if "parts" not in group]
        try:
            loss = super().step(closure)
        finally:
            self.param_groups = every
        for group in every:
            if "parts" in group:
                self.move(group)
        return loss

    def move(self, group: dict[str, Any]) -> None:
        """One step of the matrices in a group."""
        shapes: dict[tuple[int, ...], list[Tensor]] = {}
        for parameter, parts in zip(group["params"], group["parts"], strict=True):
            if parameter.grad is not None:
                shapes.setdefault((parts, *parameter.shape), []).append(parameter)
        if not shapes:
            return
        found = getattr(self, "found_inf", None)
        rate = group["lr"]
        if not isinstance(rate, Tensor):  # the same arithmetic, to the bit, as with a rate that lies on the device
            rate = torch.full((), rate, device=group["params"][0].device)
        bad = torch.zeros_like(rate, dtype=torch.bool) if found is None else found > 0
        befores, afters, aheads = [], [], []
        for (parts, rows, columns), parameters in shapes.items():
            gradients = torch.stack([p.grad for p in parameters if p.grad is not None])
            befores.append(torch.stack([self.momentum_of(p) for p in parameters]))
            afters.append(befores[-1].lerp(gradients, 1 - self.momentum))
            aheads.append(gradients.lerp_(afters[-1], self.momentum).view(-1, rows // parts, columns))
        moved, changes, momenta = list[Tensor](), list[Tensor](), list[Tensor]()
        every = zip(shapes.items(), befores, afters, directions(aheads), strict=True)
        for ((parts, rows, columns), parameters), before, after, direction in every:
            size = 0.2 * max(rows // parts, columns) ** 0.5
            change = torch.where(bad, 0, direction).to(after.dtype) * (size * rate)
            moved += parameters
            changes += change.reshape(after.shape).unbind()
            momenta += torch.where(bad, before, after).unbind()
        if group["weight_decay"]:
            torch._foreach_mul_(moved, torch.where(bad, 1, 1 - group["weight_decay"] * rate))
        torch._foreach_sub_(moved, changes)
        torch._foreach_copy_([self.momentum_of(p) for p in moved], momenta)

    def momentum_of(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(parameter)
        return state["momentum"]
