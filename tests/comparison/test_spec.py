"""A comparison as it is written: presets, files, and every mistake in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from linvit.comparison.description.building import name_of, read_candidate
from linvit.comparison.description.spec import Comparison, Measure, Part, load, preset_text, presets, renamed
from linvit.errors import LinvitError


@pytest.mark.parametrize("name", presets())
def test_presets_survive_json(name: str) -> None:
    comparison = load(name)
    assert Comparison.from_dict(comparison.to_dict()) == comparison
    assert len(preset_text(name).splitlines()) < 60
    for part in comparison.parts():
        for text in part.plans:
            assert text == "all" or read_candidate(text)


def test_the_presets_there_are() -> None:
    assert {"digits", "digits-distil", "imagenette", "imagenette-distil", "paper"} == set(presets())


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'data = "photos"\nplans = ["softmax", "mixa:keep=2"]\nseeds = [0, 1]\nsize = [64]\n'
        '[architecture]\nmodel = "vit"\ndepth = 4\n[measure]\nsize = []\n[[also]]\nsize = [96]\nseeds = [5]\n'
    )
    found = load(path)
    assert found.plans == ("softmax", "mixa:keep=2") and found.measure == Measure(size=())
    assert found.also == (Part(size=(96,), seeds=(5,)),)
    first, second = found.parts()
    assert (first.size, first.seeds) == ((64,), (0, 1))
    assert (second.size, second.seeds, second.plans) == ((96,), (5,), first.plans)


def test_parts_add_settings_and_replace_the_rest() -> None:
    comparison = Comparison(settings=("epochs=2",), also=(Part(settings=("epochs=1",), plans=("stella",)),))
    assert comparison.parts()[1].settings == ("epochs=2", "epochs=1")
    assert comparison.parts()[1].plans == ("stella",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('sedes = [1]\n[architecture]\nmodel = "fair"', "unknown field of comparison 'sedes'; did you mean seeds"),
        ('[architecture]\nmodel = "fair"\nwidht = 3', "did you mean width"),
        ("seeds = 3", "seeds of comparison must be a list of whole numbers, got 3"),
        ("seeds = [true]", "seeds of comparison must be a whole number, got True"),
        ("seeds = []", "no seeds"),
        ("plans = []", "names no plans"),
        ("size = [0]", "size must be at least 1"),
        ('mode = "distill"', "did you mean distil"),
        ('teacher = "somewhere"', "mode distil"),
        ("[measure]\nprecision = 'bf61'", "did you mean bf16"),
        ("[measure]\ndevices = ['gpu']", "unknown device 'gpu'"),
        ("[[also]]\nrecipe = 'deit'", "unknown field of also of comparison 'recipe'"),
        ("architecture = 'fair'", "architecture of comparison must be a table"),
        ("mode = 3", "mode of comparison must be a word, got 3"),
        ("seeds = [", "is no TOML file"),
    ],
)
def test_mistakes(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(LinvitError) as caught:
        load(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_what_an_older_store_was_asked_is_read() -> None:
    """Under the names that fields had then; a file of today must use those of today."""
    old = {"candidates": ["stella"], "sizes": [64], "measure": {"sizes": [64]}, "also": [{"candidates": ["qt"]}]}
    wanted = Comparison(plans=("stella",), size=(64,), measure=Measure(size=(64,)), also=(Part(plans=("qt",)),))
    assert Comparison.from_dict(renamed(old)) == Comparison.from_dict(renamed(wanted.to_dict())) == wanted
    with pytest.raises(LinvitError, match="unknown field of comparison 'candidates'"):
        Comparison.from_dict(old)


def test_unknown_preset() -> None:
    with pytest.raises(LinvitError, match="did you mean digits"):
        load("digit")
    with pytest.raises(LinvitError, match="cannot read"):
        load("nowhere.toml")


def test_candidates_are_written_in_one_way() -> None:
    for text in ("mixa:where=last,keep=2", "mixa: keep=2, where=last"):
        assert name_of(read_candidate(text)) == "mixa:keep=2,where=last"
    assert read_candidate("mixa:keep=[0,1]").options == {"keep": [0, 1]}
    assert name_of(read_candidate("mixa:keep=[0, 1]")) == "mixa:keep=[0,1]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stela", "did you mean stella"),
        ("mixa:kep=2", "unknown option of plan mixa 'kep'; did you mean keep"),
        ("efficient:variant=sofmax", "did you mean softmax"),
        ("xca:lpy=true", "did you mean lpi"),
        ("softmax:x=1", "unknown option of softmax 'x'"),
        ("mixa:2", "name:option=value"),
        ("castling:sparce=true", "did you mean sparse"),
        ("nothing.json", "cannot read the plan nothing.json"),
    ],
)
def test_a_typo_in_a_candidate(text: str, message: str) -> None:
    with pytest.raises(LinvitError) as caught:
        read_candidate(text)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_plan_file_is_a_candidate(tmp_path: Path) -> None:
    import json

    from linvit.comparison.description.building import plan_of
    from linvit.conversion import as_plan

    plan = as_plan("mixa", keep=1)
    path = tmp_path / "ours.json"
    path.write_text(json.dumps(plan.to_dict()))
    found = read_candidate(str(path))
    assert name_of(found) == "ours" and plan_of(found) == plan
