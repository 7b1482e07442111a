"""How verbs read what is typed: numbers with commas, image sizes, name=value pairs; and options several verbs share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from linvit.errors import LinvitError

ModelArg = Annotated[
    list[str] | None, typer.Option("--model-arg", metavar="NAME=VALUE", help="An argument of timm.create_model.")
]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change the recipe.")]
Root = Annotated[Path | None, typer.Option(metavar="DIR", help="Where a named set lies.")]
Loader = Annotated[str, typer.Option(help="resident (on the device), streamed, or auto.")]
Workers = Annotated[int, typer.Option(help="Processes that decode, for the streamed loader.")]


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


def square_size(text: str) -> int | None:
    """`224` as a number of pixels, for verbs whose images are square; none where nothing is given."""
    if not text:
        return None
    height, width = image_size(text)
    if height != width:
        raise LinvitError(f"images are square here: give --size {height} or --size {width}, not '{text}'")
    return height


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
