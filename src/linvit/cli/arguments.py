"""How verbs read what is typed: numbers with commas, image sizes, name=value pairs."""

from __future__ import annotations

import json
from typing import Any

from linvit.errors import LinvitError


def numbers(text: str, least: int = 1) -> list[int]:
    """`196,784` as whole numbers."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise LinvitError(f"expected whole numbers with commas, such as 196,784; got '{text}'") from None
    if min(found) < least:
        raise LinvitError(f"expected numbers of at least {least}, got '{text}'")
    return found


def image_size(text: str) -> tuple[int, int]:
    """`224` or `224x320`, height first."""
    sides = text.lower().replace("×", "x").split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise LinvitError(f"expected an image size such as 224 or 224x320 (height first), got '{text}'")
    return int(sides[0]), int(sides[-1])


def pairs(given: list[str] | None, option: str) -> dict[str, Any]:
    """`name=value` pairs, each value read as JSON where it is JSON: 2, true, null."""
    found: dict[str, Any] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise LinvitError(f"expected {option} name=value, got '{text}'")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
