"""A plan survives JSON, and a file that is no plan is one clear line."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linvit import LinvitError, attention
from linvit.attention import Mechanism, Shape, list_mechanisms, mechanism_class
from linvit.codec import to_plain
from linvit.conversion import Choice, Pick, Plan, Rule, as_plan
from linvit.conversion.plan import PLACES, PLANS

examples = [
    Choice(name, to_plain(options))
    for name in list_mechanisms()
    for options in (*mechanism_class(name).examples, *({"variant": v} for v in mechanism_class(name).variants))
]
choices = st.none() | st.sampled_from(examples)
picks = st.builds(Pick, st.integers(0, 99), st.sampled_from(PLACES))
layers = st.none() | picks | st.lists(st.integers(0, 99), max_size=5).map(tuple)
patterns = st.none() | st.sampled_from([r"blocks\.[01]\.", "downsample$", "stages.(0|2)", ""])
rules = st.builds(Rule, choices, layers, patterns, st.booleans())
plans = st.builds(
    Plan, st.text(), choices, st.lists(rules, max_size=4).map(tuple), st.lists(st.text(), max_size=3).map(tuple)
)


@given(plans)
def test_there_and_back(plan: Plan) -> None:
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


@pytest.mark.parametrize("name", [*sorted(PLANS.keys() - {"auto"}), "stella"])
def test_named_plans_there_and_back(name: str) -> None:
    plan = as_plan(name)
    assert plan.to_dict()["version"] == 1
    assert Plan.from_dict(plan.to_dict()) == plan


def test_little_is_enough_by_hand() -> None:
    written = {"version": 1, "name": "mine", "default": {"mechanism": "stella"}, "rules": [{"layers": [0, 1]}]}
    assert Plan.from_dict(written) == Plan("mine", Choice("stella"), (Rule(None, layers=(0, 1)),))


GOOD: dict[str, Any] = {"version": 1, "name": "mine", "default": None}


@pytest.mark.parametrize(
    "data, message",
    [
        ([], '"version": 1'),
        ({"name": "mine", "default": None}, '"version": 1'),
        ({**GOOD, "version": "1"}, '"version": 1'),
        ({**GOOD, "version": 2}, "version 2, this linvit reads up to 1: upgrade"),
        ({"version": 1, "name": "mine"}, "the plan lacks its default"),
        ({**GOOD, "rulez": []}, "unknown field of the plan 'rulez'; did you mean rules"),
        ({**GOOD, "default": {"mechanism": "stela"}}, "did you mean stella"),
        ({**GOOD, "default": {}}, "default of the plan lacks its mechanism"),
        ({**GOOD, "default": {"mechanism": "stella", "option": {}}}, "did you mean options"),
        ({**GOOD, "drop": [3]}, "drop of the plan must be a word"),
        ({**GOOD, "rules": [3]}, "rules of the plan must be a table"),
        ({**GOOD, "rules": [{"layers": ["0"]}]}, "layers of rules of the plan must be a whole number, got '0'"),
        (
            {**GOOD, "rules": [{"layers": {"count": True}}]},
            "count of layers of .* must be a whole number of at least 0, got True",
        ),
        ({**GOOD, "rules": [{"layers": {"count": 2, "where": "frist"}}]}, "did you mean first"),
        ({**GOOD, "rules": [{"pattern": "("}]}, "not a regular expression"),
        ({**GOOD, "rules": [{"optional": 1}]}, "optional of rules of the plan must be true or false, got 1"),
    ],
)
def test_what_is_no_plan_is_one_line(data: Any, message: str) -> None:
    with pytest.raises(LinvitError, match=message) as error:
        Plan.from_dict(data)
    assert "\n" not in str(error.value)


def test_an_option_that_json_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mechanism of someone's own, whose constructor does not say what it takes."""

    class Loose(Mechanism):
        def __init__(self, shape: Shape, *, feature=None) -> None:
            super().__init__(shape)

    monkeypatch.setitem(attention._MECHANISMS, "loose", Loose)
    with pytest.raises(LinvitError, match="JSON cannot hold"):
        Plan("mine", Choice("loose", {"feature": object()})).to_dict()
