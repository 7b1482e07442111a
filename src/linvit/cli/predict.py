"""`linvit predict`: what a model sees on photographs, in words and drawn on them."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linvit.cli import arguments
from linvit.cli.metrics import percent
from linvit.cli.output import Json, console, print_json, say, styled, table, tracked
from linvit.errors import LinvitError

if TYPE_CHECKING:
    from linvit.tasks.predicting import Prediction

FOLDER = Path("predictions")


def predict(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_DIR", help=arguments.MODEL)],
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE…", help="Photographs, or folders of them.")],
    output: Annotated[Path | None, arguments.output("DIR", "Where pictures go; predictions unless told.")] = None,
    threshold: Annotated[float, typer.Option(min=0, max=1, help="The least score of an object that is told.")] = 0.5,
    size: arguments.Size = "",
    device: arguments.Device = "auto",
    as_json: Json = False,
) -> None:
    """Tell what is on photographs: of a classifier, its five likeliest classes; of a detector, the objects; of a
    segmenter, how much of the image each class takes. The last two are drawn too, as DIR/NAME.png.

    A photograph that cannot be read is told, and the others are done; the exit code is 1 then.

    \b
    Example: linvit predict runs/voc/best photo.jpg
    Example: linvit predict deit_tiny_patch16_224 photos/
    """
    from linvit.tasks.predicting import Predictor, found_images

    if output is not None and output.is_file():
        raise LinvitError(f"{output} is a file: give a folder")
    files = [Path(str(image)) for image in found_images(images)]
    ask = Predictor(model, threshold=threshold, size=arguments.square_size(size), device=device)
    if output is not None and not ask.drawn:
        raise LinvitError(f"{model} is a classifier, of which nothing is drawn: leave --output out")
    pictures = picture_files(files, output or FOLDER) if ask.drawn else [None] * len(files)
    told: list[dict[str, Any]] = []
    unreadable: list[dict[str, str]] = []
    pairs: Iterable[tuple[Path, Path | None]] = zip(files, pictures, strict=True)
    for file, picture in tracked(pairs, "looking at photographs", len(files)) if as_json else pairs:
        try:
            found = ask(file)
        except LinvitError as reason:
            say(f"error: {' '.join(str(reason).split())}", err=True)
            unreadable.append({"image": str(file), "reason": str(reason)})
            continue
        if picture is not None:
            picture.parent.mkdir(parents=True, exist_ok=True)
            found.draw().save(picture)
        drawn = {} if picture is None else {"picture": str(picture)}
        told.append({"image": str(file), "size": list(found.size), **found.to_dict(), **drawn})
        if not as_json:
            print_prediction(found, threshold, picture)
    if as_json:
        print_json({"model": model, "images": told, "unreadable": unreadable})
    if unreadable:
        raise typer.Exit(1)


def picture_files(files: list[Path], folder: Path) -> list[Path]:
    """Where each photograph's picture goes: under its own name, with a number where that is taken or a photograph."""
    taken = {file.resolve() for file in files}
    found = []
    for file in files:
        names = (f"{file.stem}{'' if number == 1 else f'-{number}'}.png" for number in range(1, len(files) + 2))
        path = next(folder / name for name in names if (folder / name).resolve() not in taken)
        taken.add(path.resolve())
        found.append(path)
    return found


def print_prediction(found: "Prediction", threshold: float, picture: Path | None) -> None:
    from linvit.tasks.predicting import Classified, Detected, Segmented

    out = console()
    where = "" if picture is None else f" → {picture}"
    out.print(styled((f"{found}{where}", "bold")), soft_wrap=True)
    if isinstance(found, Classified):
        out.print(table(((name, percent(share)) for name, share in found.classes), **{"class": 24, "%": -6}))
    elif isinstance(found, Segmented):
        out.print(table(((name, percent(share)) for name, share in found.shares.items()), **{"class": 24, "%": -6}))
    elif isinstance(found, Detected) and found.objects:
        rows = ((name, f"{score:.2f}", *(f"{side:.0f}" for side in box)) for name, score, box in found.objects)
        sides = dict.fromkeys(("left", "top", "right", "bottom"), -6)
        out.print(table(rows, **{"class": 24}, score=-5, **sides))
    else:
        out.print(f"nothing scores {threshold:g} or more")
    out.print()
