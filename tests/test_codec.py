"""Plain data and dataclasses, there and back."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linvit.codec import canonical, digest, from_plain, parse, to_plain
from linvit.errors import LinvitError


@dataclass(frozen=True)
class Round:
    radius: float


@dataclass(frozen=True)
class Square:
    side: float
    turned: bool = False


@dataclass(frozen=True)
class Thing:
    name: str
    count: int = field(default=1, metadata={"key": "number"})
    share: float | None = field(default=None, metadata={"sparse": True})
    pair: tuple[int, int] = (1, 2)
    words: tuple[str, ...] = ()
    shape: Round | Square | None = None
    parts: tuple[Square, ...] = field(default=(), metadata={"sparse": True})
    options: dict[str, Any] = field(default_factory=dict)


numbers = st.floats(allow_nan=False, allow_infinity=False)
squares = st.builds(Square, numbers, st.booleans())
things = st.builds(
    Thing,
    st.text(),
    st.integers(),
    st.none() | numbers,
    st.tuples(st.integers(), st.integers()),
    st.lists(st.text()).map(tuple),
    st.none() | st.builds(Round, numbers) | squares,
    st.lists(squares, max_size=3).map(tuple),
    st.dictionaries(st.text(), st.none() | st.booleans() | st.integers() | st.lists(st.integers())),
)


@given(things)
def test_there_and_back_through_json(thing: Thing) -> None:
    assert from_plain(Thing, json.loads(json.dumps(to_plain(thing))), "thing") == thing


def test_names_and_defaults_in_files() -> None:
    assert to_plain(Thing("a")) == {
        **{"name": "a", "number": 1, "pair": [1, 2], "words": [], "shape": None, "options": {}},
    }
    assert to_plain(Thing("a", share=0.5))["share"] == 0.5


def test_of_several_types_the_one_whose_fields_are_there() -> None:
    made = [from_plain(Thing, {"name": "a", "shape": shape}, "thing").shape for shape in ({"side": 2}, {"radius": 1.5})]
    assert made == [Square(2), Round(1.5)]
    with pytest.raises(LinvitError, match=r"unknown field of shape of thing 'sides'"):
        from_plain(Thing, {"name": "a", "shape": {"sides": 2}}, "thing")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "thing must be a table of names and values, got []"),
        ({}, "thing lacks its name"),
        ({"name": "a", "count": 2}, "unknown field of thing 'count'"),
        ({"name": 3}, "name of thing must be a word, got 3"),
        ({"name": "a", "number": True}, "number of thing must be a whole number, got True"),
        ({"name": "a", "number": 1.5}, "number of thing must be a whole number, got 1.5"),
        ({"name": "a", "pair": [1]}, "pair of thing must be 2 whole numbers, got [1]"),
        ({"name": "a", "words": "b"}, "words of thing must be a list of words, got 'b'"),
        ({"name": "a", "parts": [{"turned": 1, "side": 1}]}, "turned of parts of thing must be true or false, got 1"),
        ({"name": "a", "options": []}, "options of thing must be a table, got []"),
    ],
)
def test_mistakes_name_the_field(data: Any, message: str) -> None:
    with pytest.raises(LinvitError) as caught:
        from_plain(Thing, data, "thing")
    assert message in str(caught.value)


def test_unknown_names_of_other_versions_are_passed_over() -> None:
    data = {"name": "a", "colour": "red", "shape": {"side": 1, "depth": 2}}
    assert from_plain(Thing, data, "thing", ignore=True) == Thing("a", shape=Square(1))


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("3", int, 3),
        ("1e-3", float, 1e-3),
        (" true ", bool, True),
        ("none", float | None, None),
        ("off", int | None, None),
        ("0.9,0.99", tuple[float, float], (0.9, 0.99)),
        ("[1, 2, 3]", tuple[int, ...], (1, 2, 3)),
        ("a word", str, "a word"),
    ],
)
def test_text_of_a_command_line(text: str, kind: Any, value: Any) -> None:
    assert parse(text, kind, "field") == value


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("x", int, "field=x: a whole number expected"),
        ("1", bool, "field=1: true or false expected"),
        ("1,2,3", tuple[float, float], "field=1,2,3: 2 numbers expected"),
        ("x", float | None, "field=x: a number or none expected"),
    ],
)
def test_text_that_is_something_else(text: str, kind: Any, message: str) -> None:
    with pytest.raises(LinvitError) as caught:
        parse(text, kind, "field")
    assert str(caught.value) == message


def test_canonical() -> None:
    assert canonical({"b": (1, 2.0), "a": {"x": None, "é": True}}) == '{"a":{"x":null,"\\u00e9":true},"b":[1,2]}'
    with pytest.raises(ValueError, match="JSON"):
        canonical(math.nan)


def test_a_digest_does_not_depend_on_order_nor_on_how_a_number_is_written() -> None:
    assert digest({"a": 1, "b": [20.0]}) == digest({"b": (20,), "a": 1.0}) == digest({"a": 1, "b": [20]}, 16)
    assert digest({"a": 1}) != digest({"a": 2}) and len(digest(1, 8)) == 8
