"""What several verbs ask for, under one name and with one meaning, and how they read what is typed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linvit.errors import LinvitError, unknown

if TYPE_CHECKING:
    import torch

# The conversion that a verb makes: read by `linvit.conversion.parse_plan` and `split_plans`.
PlanText = Annotated[
    str, typer.Option("--plan", metavar="PLAN", help="A plan or mechanism, also as mixa:keep=6, or a plan's JSON file.")
]
PlanTexts = Annotated[
    str, typer.Option("--plan", metavar="PLANS", help="Plans or mechanisms, with commas, such as stella,mixa:keep=6.")
]
PlanOptions = Annotated[list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="An option of the plan.")]
Keep = Annotated[int | None, typer.Option("--keep", min=0, help="So many layers stay quadratic (mixa) or as they are.")]
Drop = Annotated[str, typer.Option("--drop", help="What the conversion gives up, with commas, such as relative_bias.")]

# Models and images.
Size = Annotated[str, typer.Option("--size", metavar="PIXELS", help="Image size, such as 384 or 384x512.")]
Sizes = Annotated[str, typer.Option("--size", metavar="PIXELS", help="Image sizes, with commas, such as 224,384x512.")]
ModelArg = Annotated[
    list[str] | None, typer.Option("--model-arg", metavar="NAME=VALUE", help="An argument of timm.create_model.")
]
Pretrained = Annotated[bool, typer.Option(help="Start from timm's weights.")]

# Data, and where the work happens.
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change the recipe.")]
Root = Annotated[Path | None, typer.Option(metavar="DIR", help="Where a named set lies.")]
Loader = Annotated[str, typer.Option(help="resident (on the device), streamed, or auto.")]
Workers = Annotated[int, typer.Option(help="Processes that decode, for the streamed loader.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]


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
    sides = text.strip().lower().replace("×", "x").split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) > 0 for side in sides):
        raise LinvitError(f"expected an image size such as 224 or 224x320 (height first), got '{text}'")
    return int(sides[0]), int(sides[-1])


def image_sizes(text: str) -> list[tuple[int, int]]:
    """`224,384x512` as image sizes."""
    return [image_size(part) for part in text.split(",")]


def words(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """`forward,backward` as some of the known words."""
    found = tuple(part.strip() for part in text.split(","))
    for word in found:
        if word not in known:
            raise unknown("choice", word, known)
    return found


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


def find_device(name: str) -> torch.device:
    """The device that --device names."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise LinvitError(f"unknown device '{name}'; known: auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise LinvitError("there is no CUDA device here: use --device cpu")
    return torch.device(name)
