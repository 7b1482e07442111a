"""`linvit list`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from linvit.attention import list_mechanisms, options_of
from linvit.conversion import list_plans
from linvit.models import list_models
from tests.cli.conftest import Outcome


def test_everything_registered_is_listed(linvit: Callable[..., Outcome]) -> None:
    outcome = linvit("list", "--json")
    assert outcome.code == 0
    names = {kind: [row["name"] for row in rows] for kind, rows in outcome.json.items()}
    assert names == {"mechanisms": list_mechanisms(), "models": list_models(), "plans": list_plans()}


@pytest.mark.parametrize("kind", ["mechanisms", "models", "plans"])
def test_one_kind_fits_a_terminal(linvit: Callable[..., Outcome], kind: str) -> None:
    text = linvit("list", kind).out
    assert max(len(line) for line in text.splitlines()) <= 100
    names = [row["name"] for row in linvit("list", kind, "--json").json[kind]]
    assert names and all(name in text for name in names)


def test_no_option_is_cut_off(linvit: Callable[..., Outcome]) -> None:
    text = linvit("list", "mechanisms").out
    for name in list_mechanisms():
        for option, default in options_of(name).items():
            if option != "variant":
                assert f"{option}={default}" in text


def test_capabilities_in_json(linvit: Callable[..., Outcome]) -> None:
    rows = {row["name"]: row for row in linvit("list", "mechanisms", "--json").json["mechanisms"]}
    assert rows["softmax"]["capabilities"]["linear"] is False
    assert rows["stella"] == {
        "name": "stella",
        "paper": "MixA",
        "variants": [],
        "options": {"rotary": "after", "centre": False, "local": 0, "dynamic": 0},
        "capabilities": rows["stella"]["capabilities"],
    }
    assert rows["stella"]["capabilities"]["linear"] is True
    assert rows["qt"]["variants"] == ["released", "exact", "compact"]
    assert rows["qt"]["options"]["position"] is False


def test_plans_show_their_options(linvit: Callable[..., Outcome]) -> None:
    rows = {row["name"]: row for row in linvit("list", "plans", "--json").json["plans"]}
    assert rows["mixa"]["options"]["keep"] == 6


def test_unknown_kind_is_one_line_with_a_suggestion(linvit: Callable[..., Outcome]) -> None:
    outcome = linvit("list", "mechanism")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: unknown thing to list 'mechanism'; did you mean mechanisms?\n"
