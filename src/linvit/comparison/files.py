"""Result files as text: each ends in the digest of all else it says, so that damage on the way is noticed.

Files from before there were digests have none, and are believed.
"""

import json
from collections.abc import Mapping
from typing import Any

from linvit.codec import digest, from_plain, to_plain
from linvit.comparison.results import KEY, AnyResult, Failure, Run, Speed
from linvit.errors import LinvitError
from linvit.files import to_json

SEAL = "digest"
KINDS: dict[str, type[AnyResult]] = {"run": Run, "teacher": Run, "speed": Speed, "failure": Failure}
LARGEST_NUMBER = 2.0**63  # above what anybody counts or times


def to_text(data: Any) -> str:
    """The text of a file: a result, or what was asked for."""
    plain = to_plain(data)
    return to_json({**plain, SEAL: seal(plain)})


def seal(data: Mapping[str, Any]) -> str:
    return digest({name: value for name, value in data.items() if name != SEAL}, 64)


def parse_result(content: bytes | str, name: str) -> AnyResult:
    """A result from the text of its file, whose name must begin with its key."""
    found = parse_object(content)
    kind = KINDS.get(str(found.get("kind")))
    if kind is None:
        raise LinvitError("it is damaged or no result file")
    result = from_plain(kind, found, "the result", ignore=True)
    if not KEY.fullmatch(result.key) or not name.startswith(result.key):
        raise LinvitError("its name is not its key")
    return result


def parse_object(content: bytes | str) -> dict[str, Any]:
    """A JSON object of numbers that are finite, as other programs want it, and with the digest that it names."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not finite(found):
        raise LinvitError("it is damaged or no result file")
    if SEAL in found and found[SEAL] != seal(found):
        raise LinvitError("it is damaged: its digest is wrong")
    return found


def finite(value: Any) -> bool:
    """Whether all numbers in plain data are some that can be reckoned with."""
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return not isinstance(value, int | float) or abs(value) < LARGEST_NUMBER
