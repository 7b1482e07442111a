"""`linvit list`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import pytest

from linvit.attention import list_mechanisms, options_of
from linvit.cli.list import written
from linvit.conversion import list_plans
from linvit.errors import LinvitError
from linvit.models import list_models
from linvit.training import Config, list_recipes, override, recipe
from tests.cli.conftest import Outcome


def test_everything_registered_is_listed(linvit: Callable[..., Outcome]) -> None:
    outcome = linvit("list", "--json")
    assert outcome.code == 0
    names = {kind: [row["name"] for row in rows] for kind, rows in outcome.json.items()}
    every = {"mechanisms": list_mechanisms(), "models": list_models(), "plans": list_plans()}
    assert names == every | {"recipes": [*list_recipes(), *list_recipes("detect"), *list_recipes("features")]}


@pytest.mark.parametrize("kind", ["mechanisms", "models", "plans", "recipes", "settings"])
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


def test_settings_are_all_there_with_the_recipe_s_values(linvit: Callable[..., Outcome]) -> None:
    """Every field of a recipe and of its stages; the names and values are what --set takes."""
    rows = {row["name"]: row for row in linvit("list", "settings", "fast", "--json").json["settings"]}
    config = recipe("fast")
    assert {f.name for f in fields(Config)} - {"recipe", "stages"} == {name for name in rows if "." not in name}
    assert {f"stages.{s.name}.{f.name}" for s in config.stages for f in fields(s) if f.name != "name"} <= set(rows)
    assert rows["muon_lr"]["value"] == config.muon_lr and rows["muon_lr"]["default"] == Config().muon_lr
    assert all(len(row["meaning"]) > 5 and row["takes"] for row in rows.values())
    assert rows["clip_norm"]["takes"] == "a number, 0 or more, or none" and "muon" in rows["optimiser"]["choices"]
    assert override(config, [f"{name}={written(row['value'])}" for name, row in rows.items()]) == config
    dense = linvit("list", "settings", "mixa-coco", "--json").json["settings"]
    assert next(row["value"] for row in dense if row["name"] == "layer_decay") == 0.6
    assert "fast" in linvit("list", "settings", "fast", "--task", "segment").out


def test_settings_mistakes_are_one_line(linvit: Callable[..., Outcome]) -> None:
    for args, message in (
        (("settings", "fst"), "unknown recipe 'fst'; did you mean fast? (linvit list recipes shows all)"),
        (("plans", "fast"), "go with settings"),
        (("settings", "fast", "--task", "sing"), "unknown task 'sing'"),
    ):
        outcome = linvit("list", *args)
        assert outcome.code == 2 and message in outcome.err
    with pytest.raises(LinvitError, match=r"unknown setting 'foo'; known: .*\(linvit list settings shows all\)"):
        override(Config(), ["foo=1"])


def test_unknown_kind_is_one_line_with_a_suggestion(linvit: Callable[..., Outcome]) -> None:
    outcome = linvit("list", "mechanism")
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == "error: unknown thing to list 'mechanism'; did you mean mechanisms or recipes?\n"
