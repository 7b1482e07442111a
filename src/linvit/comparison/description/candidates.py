"""A candidate as it is written, `mixa:keep=2,where=last`, and the plan it stands for.

A name is a plan's or a mechanism's; where both have it (castling, qt, mobile) the plan is meant, which is the paper's
whole attention. A plan's JSON file is a candidate as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from linvit.attention import mechanism_class, options_of
from linvit.comparison.results import Candidate
from linvit.conversion.plan import Plan, as_plan, parse_plan, split_options
from linvit.errors import unknown

ALL = "all"


def read_candidate(text: str) -> Candidate:
    """The candidate that is written so."""
    name, options = split_options(text)
    if name.endswith(".json"):
        found = Candidate(Path(name).stem, {}, parse_plan(text).to_dict())
    else:
        found = Candidate(name, options)
    check_options(plan_of(found))
    return found


def plan_of(candidate: Candidate) -> Plan:
    """The plan that makes a softmax model this candidate. Layers that are to be measured stand first here: which ones
    they are, only the trained model and its images tell."""
    if candidate.plan is not None:
        return Plan.from_dict(candidate.plan)
    options = {name: value for name, value in candidate.options.items() if not candidate.measured or name != "layers"}
    return as_plan(candidate.name, **options)


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


def name_of(candidate: Candidate) -> str:
    """The candidate as it is written, always in the same way."""
    options = candidate.options
    values = (f"{name}={text_of(options[name])}" for name in sorted(options))
    return f"{candidate.name}:{','.join(values)}" if options else candidate.name


def text_of(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))


def paper_of(candidate: Candidate) -> str:
    """The paper that a candidate's main mechanism comes from."""
    default = plan_of(candidate).default
    return mechanism_class(default.mechanism).paper if default is not None else ""


def chosen(texts: Iterable[str]) -> tuple[list[Candidate], bool]:
    """The candidates that are named, each once, and whether `all` the others are wanted too."""
    found: dict[str, Candidate] = {}
    everything = False
    for text in texts:
        if text.strip() == ALL:
            everything = True
            continue
        candidate = read_candidate(text)
        found.setdefault(name_of(candidate), candidate)
    return list(found.values()), everything
