"""What several verbs ask for, under one name and with one meaning, and how they read what is typed."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linvit.errors import LinvitError, NotHonoured, unknown
from linvit.files import place

if TYPE_CHECKING:
    import torch

# The conversion that a verb makes: read by `linvit.conversion.parse_plan` and `split_plans`.
PlanText = Annotated[
    str, typer.Option("--plan", metavar="PLAN", help="A plan or mechanism, as mixa:keep=6, or a plan's JSON.")
]
PlanTexts = Annotated[str, typer.Option(metavar="PLANS", help="Plans or mechanisms, such as stella,mixa:keep=6.")]
PlanOptions = Annotated[list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="An option of the plan.")]
Keep = Annotated[int | None, typer.Option("--keep", min=0, help="So many layers stay quadratic (mixa) or as they are.")]
Drop = Annotated[str, typer.Option("--drop", help="What to give up beyond what the plan does, such as relative_bias.")]

# Models and images.
MODEL = "A timm model, a folder that linvit or transformers saved, or user/name on the hub."
Size = Annotated[str, typer.Option(metavar="PIXELS", help="Image size, such as 384x512; the model's own unless told.")]
Sizes = Annotated[str, typer.Option(metavar="PIXELS", help="Image sizes, with commas, such as 224,384x512.")]
ModelArg = Annotated[
    list[str] | None, typer.Option(metavar="NAME=VALUE", help="An argument of timm.create_model, or of a config.")
]
Pretrained = Annotated[bool, typer.Option(help="Start from timm's or the hub's weights.")]
Teacher = Annotated[str, typer.Option(metavar="MODEL_OR_DIR", help="Whom to learn from, or to compare with.")]

# Detectors and segmenters.
Task = Annotated[str, typer.Option(help="classify, detect, segment or features; what the model does unless told.")]
Head = Annotated[str, typer.Option(help="What goes on a trunk to detect or segment, such as faster_rcnn or upernet.")]
Pyramid = Annotated[str, typer.Option(help="How a trunk comes to four maps: own, or for a ViT simple or adapter.")]

# Recipes, data, and where the work happens.
Recipe = Annotated[
    str,
    typer.Option(
        help="mixa, castling, qtvit, mobile, fair, deit, finetune, distil or fast; to detect or segment mixa-coco, "
        "mixa-ade, qtvit-coco, qtvit-ade, castling-coco, castling-ade, finetune or fast; of features fast."
    ),
]
Settings = Annotated[list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change the recipe.")]
Data = Annotated[
    str,
    typer.Option(
        help="digits, an image folder, a .tar of one, or a set timm knows by name; to detect or segment a folder or "
        ".tar in COCO's or PASCAL VOC's format, or of images with masks."
    ),
]
Root = Annotated[Path | None, typer.Option(metavar="DIR", help="Where a named set lies.")]
Loader = Annotated[str, typer.Option(help="resident (on the device), streamed, or auto.")]
Workers = Annotated[int, typer.Option(help="Processes that decode, for the streamed loader.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]


def path(text: str) -> Path:
    """Where to write, as it is typed."""
    try:
        return place(text)
    except LinvitError as mistake:
        raise typer.BadParameter(str(mistake)) from None


def output(metavar: str, help: str) -> Any:
    """The option -o, for Annotated."""
    return typer.Option("--output", "-o", metavar=metavar, parser=path, help=help)


Picture = Annotated[Path | None, typer.Option(metavar="FILE", parser=path, help="Draw it, as .png, .svg or .pdf.")]


def plan_options(option: list[str] | None, keep: int | None, where: str = "", layers: str = "") -> dict[str, Any]:
    """The options of a plan: --option, and the layers to keep, as --keep and --where or --layers give them."""
    if keep is not None and layers:
        raise LinvitError("--keep counts layers and --layers names them: give one of the two")
    if where and keep is None:
        raise LinvitError("--where places the layers that --keep counts: give --keep too")
    options = pairs(option, "--option")
    given = {"keep": numbers(layers, least=0) if layers else keep, "where": where or None}
    kept = {name: value for name, value in given.items() if value is not None}
    if options.keys() & kept.keys():
        raise LinvitError("the layers to keep are given twice: give --keep and --where, or --layers, or --option")
    return options | kept


@contextmanager
def dropping(drop: str) -> Iterator[list[str]]:
    """What --drop names; what it does not name and should is told as that option takes it."""
    from linvit.conversion.convert import names_to_drop

    given_up = list(names_to_drop(feature.strip() for feature in drop.split(",") if feature.strip()))
    try:
        yield given_up
    except NotHonoured as lacking:
        together = ",".join([*given_up, *lacking.features])
        hint = lacking.hint("--option local=5")
        raise LinvitError(f"{lacking.reason}: --drop {together} gives up what it cannot{hint}") from None


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


def square_size(text: str) -> int | None:
    """`224` as a number of pixels, for verbs whose images are square; none where nothing is given."""
    height, width = image_size(text) if text else (None, None)
    if height != width:
        raise LinvitError(f"images are square here: give --size {height} or --size {width}, not '{text}'")
    return height


def words(text: str, known: Sequence[str]) -> tuple[str, ...]:
    """`forward,backward` as some of the known words."""
    found = tuple(part.strip() for part in text.split(","))
    for word in found:
        if word not in known:
            raise unknown("choice", word, known)
    return found


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


def check_file(path: Path | None) -> None:
    """Raise unless a file of this name can be written. Asked before the work, so that nobody waits for nothing."""
    if path is not None and path.is_dir():
        raise LinvitError(f"{path} is a folder: give a file")
    if path is not None and not path.parent.is_dir():
        raise LinvitError(f"no folder {path.parent} to put {path.name} in; make it first")


def find_device(name: str) -> "torch.device":
    """The device that --device names."""
    import torch

    usual = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("auto", "cpu", "cuda"):
        raise LinvitError(f"unknown device '{name}'; known: auto, cpu, cuda")
    if name == "cuda" and usual == "cpu":
        raise LinvitError("there is no CUDA device here: use --device cpu")
    return torch.device(usual if name == "auto" else name)
