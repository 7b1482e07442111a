"""A candidate as it is written, `mixa:keep=2,where=last`, and the plan it stands for.

A name is a plan's or a mechanism's; where both have it (castling, qt, mobile) the plan is meant, which is the paper's
whole attention. A plan's JSON file is a candidate as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from linvit.attention import mechanism_class
from linvit.attention.registry import options_of
from linvit.conversion.plan import Plan, as_plan
from linvit.errors import LinvitError, unknown

COMMA = re.compile(r",(?![^\[{(]*[\]})])")  # one that stands outside brackets
ALL = "all"


def read_candidate(text: str) -> dict[str, Any]:
    """The candidate as plain data: its name and options, and for a plan's file the plan."""
    name, colon, rest = text.strip().partition(":")
    if name.endswith(".json"):
        if colon:
            raise LinvitError(f"options go with a plan's name, not with a plan's file: '{text}'")
        try:
            plan = Plan.from_dict(json.loads(Path(name).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise LinvitError(f"{name} is no plan: {error}") from None
        found: dict[str, Any] = {"name": Path(name).stem, "options": {}, "plan": plan.to_dict()}
    else:
        found = {"name": name, "options": read_options(rest, text) if colon else {}}
    check_options(plan_of(found))
    return found


def read_options(rest: str, text: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for piece in COMMA.split(rest):
        name, equals, value = piece.partition("=")
        if not equals or not name.strip():
            raise LinvitError(f"a candidate's options are written name:option=value,option=value; got '{text}'")
        try:
            options[name.strip()] = json.loads(value)
        except ValueError:
            options[name.strip()] = value.strip()
    return options


def plan_of(candidate: dict[str, Any]) -> Plan:
    """The plan that makes a softmax model this candidate. Layers that are to be measured stand first here: which ones
    they are, only the trained model and its images tell."""
    if "plan" in candidate:
        return Plan.from_dict(candidate["plan"])
    options = dict(candidate["options"])
    if measured(candidate):
        del options["layers"]
    return as_plan(candidate["name"], **options)


def measured(candidate: Mapping[str, Any]) -> bool:
    """Whether the quadratic layers of MixA are to be measured: `mixa:keep=6,layers=measured`."""
    return candidate["name"] == "mixa" and candidate["options"].get("layers") == "measured"


def check_options(plan: Plan) -> None:
    """Whether the mechanisms of a plan take the options it gives them."""
    for choice in (plan.default, *(rule.choice for rule in plan.rules)):
        if choice is None:
            continue
        known = options_of(choice.mechanism)
        for option, value in choice.options.items():
            if option not in known:
                raise unknown(f"option of {choice.mechanism}", option, known)
            variants = mechanism_class(choice.mechanism).variants
            if option == "variant" and value not in variants:
                raise unknown(f"variant of {choice.mechanism}", str(value), variants)


def name_of(candidate: dict[str, Any]) -> str:
    """The candidate as it is written, always in the same way."""
    options = candidate["options"]
    values = (f"{name}={text_of(options[name])}" for name in sorted(options))
    return f"{candidate['name']}:{','.join(values)}" if options else candidate["name"]


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def paper_of(candidate: dict[str, Any]) -> str:
    """The paper that a candidate's main mechanism comes from."""
    default = plan_of(candidate).default
    return mechanism_class(default.mechanism).paper if default is not None else ""


def split_candidates(text: str) -> list[str]:
    """`a,b:x=1,y=2,c` as candidates: a piece with `=` and no colon is a further option of the one before."""
    found: list[str] = []
    for piece in (piece.strip() for piece in COMMA.split(text)):
        if found and "=" in piece and ":" not in piece.partition("=")[0]:
            found[-1] += f",{piece}"
        elif piece:
            found.append(piece)
    return found


def chosen(texts: Iterable[str]) -> tuple[list[dict[str, Any]], bool]:
    """The candidates that are named, each once, and whether `all` the others are wanted too."""
    found: dict[str, dict[str, Any]] = {}
    everything = False
    for text in texts:
        if text.strip() == ALL:
            everything = True
            continue
        candidate = read_candidate(text)
        found.setdefault(name_of(candidate), candidate)
    return list(found.values()), everything
