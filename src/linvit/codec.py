"""Dataclasses as plain data and back, for every file that linvit writes, and one digest of such data.

`to_plain` gives what JSON and TOML hold. `from_plain` reads it back by the fields' types: an unknown name, a value of
another type or a missing field is one line that names it. `parse` reads one value from a command line's text, and
`keywords` the keyword arguments of a function, by its annotations.

A type may have a range, `Annotated[int, Range(1, 64)]`, and words stand in a `Literal["first", "last"]`.

A field may say in its metadata what it is called in files (`{"key": "input_size"}`), and that it is left out of files
while it has its default (`{"sparse": True}`).
"""

import hashlib
import inspect
import json
import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from linvit.errors import LinvitError, unknown

T = TypeVar("T")
NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", dict: "a table"}


@dataclass(frozen=True)
class Range:
    """Which numbers a type takes: finite ones, both ends included."""

    least: float = -math.inf
    most: float = math.inf
    odd: bool = False

    def __contains__(self, value: float) -> bool:
        return math.isfinite(value) and self.least <= value <= self.most and not (self.odd and value % 2 == 0)

    def describe(self, what: str) -> str:
        """The range in words; `what` is the type without it."""
        what = "an odd number" if self.odd else what
        if self.most < math.inf:
            return f"{what} from {self.least:g} to {self.most:g}"
        return f"{what} of at least {self.least:g}" if self.least > -math.inf else f"a finite {what.split(' ', 1)[1]}"


def to_plain(value: Any) -> Any:
    """Data that JSON holds: dataclasses and mappings as dicts, tuples as lists."""
    if is_dataclass(value) and not isinstance(value, type):
        kept = (f for f in fields(value) if not (f.metadata.get("sparse") and getattr(value, f.name) == default_of(f)))
        return {key_of(f): to_plain(getattr(value, f.name)) for f in kept}
    if isinstance(value, Mapping):
        return {name: to_plain(item) for name, item in value.items()}
    return [to_plain(item) for item in value] if isinstance(value, tuple | list) else value


def from_plain(kind: type[T], data: Any, where: str, *, ignore: bool = False) -> T:
    """A dataclass from plain data; `where` says in errors whose data it is. With `ignore`, unknown names are passed
    over, as in files that a newer or older version wrote."""
    if not isinstance(data, Mapping):
        raise LinvitError(f"{where} must be a table of names and values, got {data!r}")
    known = {key_of(f): f for f in fields(kind) if f.init}  # type: ignore[arg-type]
    values, types_of = {}, hints(kind)  # type: ignore[arg-type]
    for key, value in data.items():
        if key in known:
            values[known[key].name] = convert(value, types_of[known[key].name], f"{key} of {where}", ignore)
        elif not ignore:
            raise unknown(f"field of {where}", str(key), known)
    for key, f in known.items():
        if f.name not in values and required(f):
            raise LinvitError(f"{where} lacks its {key}")
    return kind(**values)


def convert(value: Any, kind: Any, where: str, ignore: bool = False) -> Any:
    """A value as its field's type says, or an error. Whole numbers pass for floats, and stay as they are."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if isinstance(value, str) and (words := words_of(kind)) and value not in words:
        raise unknown(where, value, words)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        options = [option for option in inner if option is not type(None)]
        fitting = [option for option in options if fits(value, option)]
        if not fitting and not any(map(is_dataclass, options)):
            raise LinvitError(f"{where} must be {describe(kind)}, got {value!r}")
        return convert(value, (fitting or options)[0], where, ignore)
    if origin is tuple and isinstance(value, list | tuple | range):
        if inner[-1] is not Ellipsis and len(value) != len(inner):
            raise LinvitError(f"{where} must be {describe(kind)}, got {value!r}")
        each = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(convert(item, one, where, ignore) for item, one in zip(value, each, strict=True))
    if origin is dict and isinstance(value, Mapping):
        return {name: convert(item, inner[1], f"{name} of {where}", ignore) for name, item in value.items()}
    if origin is list and isinstance(value, list | tuple | range):
        return [convert(item, inner[0], where, ignore) for item in value]
    if is_dataclass(kind) and isinstance(value, Mapping):
        return from_plain(kind, value, where, ignore=ignore)  # type: ignore[arg-type]
    if not fits(value, kind):
        raise LinvitError(f"{where} must be {describe(kind)}, got {value!r}")
    return value


def fits(value: Any, kind: Any) -> bool:
    """Whether a value could be of this type, by its outside."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        return fits(value, inner[0]) and all(value in rule for rule in inner[1:] if isinstance(rule, Range))
    if origin is Literal:
        return any(type(value) is type(known) and value == known for known in inner)
    if is_dataclass(origin):
        whole = isinstance(value, Mapping) and all(key_of(f) in value for f in fields(origin) if required(f))
        return whole or isinstance(value, origin)  # type: ignore[arg-type]
    if origin is dict:
        return isinstance(value, Mapping)
    if origin in (tuple, list):
        return isinstance(value, list | tuple | range)
    if origin is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is origin


def parse(text: str, kind: Any, where: str) -> Any:
    """A value of this type from a command line's text: `none`, `true`, `1e-3`, `0.9,0.99`."""
    try:
        return read_text(text.strip(), kind)
    except ValueError:
        raise LinvitError(f"{where}={text}: {describe(kind)} expected") from None


def read_text(text: str, kind: Any) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        if text.lower() in ("none", "off"):
            return None
        return read_text(text, next(option for option in inner if option is not type(None)))
    if origin is tuple:
        if text.lower() == "none" and inner[-1] is Ellipsis:
            return ()
        pieces = [piece.strip() for piece in text.strip("()[]").split(",") if piece.strip()]
        if inner[-1] is not Ellipsis and len(pieces) != len(inner):
            raise ValueError
        return tuple(read_text(piece, inner[0]) for piece in pieces)
    if origin is Annotated or origin is Literal:
        value = read_text(text, inner[0] if origin is Annotated else type(inner[0]))
        if not fits(value, kind):
            raise ValueError
        return value
    if kind is bool:
        if text.lower() not in ("true", "false"):
            raise ValueError
        return text.lower() == "true"
    return kind(text)


def describe(kind: Any) -> str:
    """A type in an error's words."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if option is type(None) else describe(option) for option in inner)
    if origin is Annotated:
        rules = [rule for rule in inner[1:] if isinstance(rule, Range)]
        return rules[0].describe(describe(inner[0])) if rules else describe(inner[0])
    if origin is Literal:
        return ("one of " if len(inner) > 1 else "") + ", ".join(map(str, inner))
    if origin in (tuple, list):
        first = get_args(inner[0])[0] if get_origin(inner[0]) is Annotated else inner[0]
        if is_dataclass(first):
            return "a list of tables"
        if first is str:
            return "a list of words"
        what = "whole numbers" if first is int else "numbers"
        return f"a list of {what}" if origin is list or inner[-1] is Ellipsis else f"{len(inner)} {what}"
    return "a table" if is_dataclass(kind) else NAMES.get(origin or kind, "another value")


def key_of(field: Field[Any]) -> str:
    """A field's name in files."""
    return field.metadata.get("key", field.name)


def required(field: Field[Any]) -> bool:
    """Whether files must have it."""
    return field.init and field.default is MISSING and field.default_factory is MISSING


def default_of(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


@lru_cache(maxsize=256)
def hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def check_fields(owner: Any) -> None:
    """Whether the fields of a dataclass are of their types."""
    for name, kind in hints(type(owner)).items():  # type: ignore[arg-type]
        convert(getattr(owner, name), kind, name)


def keywords(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """The type and the default of a function's keyword-only parameters; what is not annotated takes anything."""
    kinds = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return {p.name: (kinds.get(p.name, Any), p.default) for p in parameters if p.kind is p.KEYWORD_ONLY}


def check_keywords(given: Mapping[str, Any], kinds: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Keyword arguments by their types. One line names what is unknown, of another type, or out of range."""
    found = {}
    for name, value in given.items():
        if name not in kinds:
            raise unknown(f"option of {where}", name, kinds)
        found[name] = convert(value, kinds[name], f"{name} of {where}")
    return found


def words_of(kind: Any) -> list[str]:
    """The words that a type lists; none where it is not of words."""
    if get_origin(kind) in (Union, types.UnionType):
        return [word for option in get_args(kind) for word in words_of(option)]
    return [word for word in get_args(kind) if isinstance(word, str)] if get_origin(kind) is Literal else []


def canonical(value: Any) -> str:
    """One text for one value: sorted names, no spaces, 20.0 as 20."""
    return json.dumps(simple(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def simple(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): simple(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [simple(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def digest(value: Any, length: int = 16) -> str:
    """A key for plain data: the first digits of its SHA-256."""
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:length]
