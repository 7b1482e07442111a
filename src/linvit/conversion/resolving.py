"""Plans that look at the model before they name its layers: those whose kept layers are measured, and `auto`."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from linvit.conversion.convert import find_hosts, own_size
from linvit.conversion.plan import Auto, Pick, Plan
from linvit.conversion.planning import Setting, Study, study
from linvit.conversion.sensitivity import Sensitivity, measure_sensitivity
from linvit.errors import LinvitError, reason


def layers_to_measure(plan: Plan) -> int:
    """How many layers a plan keeps, where `calibrate` is to measure which."""
    pick = plan.rules[0].layers if plan.rules else None
    if not isinstance(pick, Pick) or pick.where != "first":
        raise LinvitError(f"calibrate= measures which layers {plan.name} keeps: give keep=<a number>, and no where=")
    return pick.count


def place_by_sensitivity(
    model: nn.Module, plan: Plan, loader: Iterable[Any], named: Collection[str], advance: Callable[[], None]
) -> tuple[Plan, Sensitivity]:
    """The plan with the layers that are measured to be kept, and the measurement, for `calibrate`."""
    count, kept = layers_to_measure(plan), plan.rules[0].choice
    linear = replace(plan, rules=plan.rules[1:])
    quadratic = None if kept is None else Plan(plan.name, kept, drop=plan.drop)
    found = measure_sensitivity(
        model, loader, keep=count, linear=linear, quadratic=quadratic, drop=named, advance=advance
    )
    return replace(plan, rules=(replace(plan.rules[0], layers=found.keep), *plan.rules[1:])), found


def resolve(
    model: nn.Module,
    plan: Auto,
    named: Collection[str],
    size: tuple[int, int] | None = None,
    device: torch.device | str | None = None,
) -> tuple[Plan, Study]:
    """The plan that `auto` becomes for this model, and what was measured: on its own device unless told."""
    stay = {index for rule in plan.rules for index in rule.matching([name for name, _ in find_hosts(model)])}
    place = None if device is None else present(device)
    setting = Setting.usual(model, size or own_size(model), place)
    found = study(model, setting, candidates=plan.candidates, drop=named, stay=stay, points=3)
    return found.choose().plan, found


def present(device: torch.device | str) -> torch.device:
    """The device, where it can be used here."""
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (AssertionError, RuntimeError) as error:
        raise LinvitError(f"there is no device {device} here ({reason(error)}): use cpu") from None
    return place
