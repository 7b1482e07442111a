"""Options are checked once, by their declared types and ranges, wherever they come from: Python, a terminal, a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import pytest

from linvit.attention import Range, TokenGrid, check_options, create_attention, declared, list_mechanisms
from linvit.attention import mechanism_class as class_of
from linvit.codec import check_keywords, describe, parse
from linvit.conversion import Plan, as_plan, parse_plan
from linvit.errors import LinvitError

# mechanism, option, value, and what the error says of it
WRONG: list[tuple[str, str, Any, str]] = [
    ("performer", "features", -1, "features of performer must be a whole number from 1 to 65536 or none, got -1"),
    ("window", "window", "abc", "window of window must be a whole number from 1 to 1024 or 2 whole numbers, got 'abc'"),
    ("window", "window", [2, "x"], "window of window must be a whole number from 1 to 1024, got 'x'"),
    ("window", "window", [2, 3, 4], "window of window must be 2 whole numbers, got [2, 3, 4]"),
    ("castling", "kernel_size", -3, "kernel_size of castling must be an odd number from 1 to 255 or 0 or none, got -3"),
    ("castling", "kernel_size", 4, "kernel_size of castling must be an odd number from 1 to 255 or 0 or none, got 4"),
    ("castling", "eps", "abc", "eps of castling must be a number from 0 to 1, got 'abc'"),
    ("castling", "eps", -1, "eps of castling must be a number from 0 to 1, got -1"),
    ("relu_linear", "eps", float("nan"), "eps of relu_linear must be a number from 0 to 1, got nan"),
    ("cosformer", "variant", 3, "variant of cosformer must be one of grid, sequence or none, got 3"),
    ("cosformer", "variant", "grd", "unknown variant of cosformer 'grd'; did you mean grid?"),
    ("stella", "variant", "x", "unknown option of stella 'variant'; known: centre, dynamic, local, rotary"),
    ("mobile", "gate", "sex", "unknown gate of mobile 'sex'; did you mean se?"),
    ("mobile", "competition", 1, "competition of mobile must be true or false, got 1"),
    ("stella", "local", True, "local of stella must be an odd number from 1 to 255 or 0, got True"),
    ("qt", "beta", float("inf"), "beta of qt must be a finite number, got inf"),
]


@pytest.mark.parametrize("name, option, value, message", WRONG)
@pytest.mark.parametrize("door", ["python", "plan", "file"])
def test_a_wrong_option_is_one_line_at_every_door(name: str, option: str, value: Any, message: str, door: str) -> None:
    written = {"version": 1, "name": "p", "default": {"mechanism": name, "options": {option: value}}}
    doors: dict[str, Callable[[], Any]] = {
        "python": lambda: create_attention(name, heads=2, head_dim=8, grid=TokenGrid(2, 2), **{option: value}),
        "plan": lambda: as_plan(name, **{option: value}),
        "file": lambda: Plan.from_dict(written),
    }
    with pytest.raises(LinvitError) as error:
        doors[door]()
    assert str(error.value) == message


LAYERS = "a whole number of at least 0 or a list of whole numbers"


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "mixa:keep=abc",
            "keep of plan mixa must be a whole number of at least 0 or a list of whole numbers, got 'abc'",
        ),
        (
            "mixa:keep=true",
            "keep of plan mixa must be a whole number of at least 0 or a list of whole numbers, got True",
        ),
        (
            "stella:keep=-1",
            "keep of plan stella must be a whole number of at least 0 or a list of whole numbers, got -1",
        ),
        ("stella:keep=2,where=frist", "unknown where of plan stella 'frist'; did you mean first?"),
        ("castling:sparse=3", "sparse of plan castling must be true or false, got 3"),
        ("castling:eps=-1", "eps of castling must be a number from 0 to 1, got -1"),
        ("mixa:kep=3", "unknown option of plan mixa 'kep'; did you mean keep?"),
    ],
)
def test_a_plan_that_is_typed_wrongly(text: str, message: str) -> None:
    with pytest.raises(LinvitError) as error:
        parse_plan(text)
    assert str(error.value) == message


@pytest.mark.parametrize("field", ["heads", "head_dim", "value_dim", "dim"])
@pytest.mark.parametrize("value", [0, -3, 2.5, "8", True])
def test_a_shape_of_nothing(field: str, value: Any) -> None:
    with pytest.raises(LinvitError, match=f"^{field} must be a whole number of at least 1 or none, got"):
        create_attention("stella", **{field: value})


HOSTILE = [
    "abc",
    "",
    -1,
    -3,
    0.5,
    float("nan"),
    float("inf"),
    10**12,
    True,
    None,
    [],
    [1],
    [0, 0],
    {},
    {"a": 1},
    [None],
]


@pytest.mark.parametrize("name", list_mechanisms())
def test_every_option_has_a_type_and_never_a_traceback(name: str) -> None:
    """What is let through builds a mechanism, and what is not is a LinvitError that names the option."""
    for option, (kind, default) in declared(class_of(name)).items():
        assert kind is not Any, f"{name} does not say what {option} takes"
        assert check_options(name, {option: default}) == {option: default}
        for value in HOSTILE:
            try:
                create_attention(name, heads=2, head_dim=8, dim=16, grid=TokenGrid(3, 3), **{option: value})
            except LinvitError as error:
                assert "\n" not in str(error) and option in str(error)


def test_types_in_words_and_from_text() -> None:
    share = Annotated[float, Range(0, 1)]
    assert describe(share | None) == "a number from 0 to 1 or none"
    assert describe(Literal["a", "b"]) == "one of a, b"
    assert parse("0.5", share, "x") == 0.5 and parse("none", share | None, "x") is None
    assert parse("b", Literal["a", "b"], "x") == "b"
    for text, kind in (("1.5", share), ("nan", share), ("c", Literal["a", "b"])):
        with pytest.raises(LinvitError, match=f"x={text}: .* expected"):
            parse(text, kind, "x")
    assert check_keywords({"n": range(3)}, {"n": tuple[int, ...]}, "f") == {"n": (0, 1, 2)}
