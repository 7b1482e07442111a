"""`linvit convert`: swap the attention of a model, keep the weights, save the result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linvit.cli.arguments import image_size, numbers, pairs
from linvit.cli.output import Json, console, print_json, progress, table
from linvit.errors import LinvitError, NotHonoured
from linvit.figures.files import check_picture

if TYPE_CHECKING:
    from torch import nn

    from linvit.conversion import Plan, Report
    from linvit.conversion.sensitivity import Sensitivity

# What --drop may name: all that the hosts ask for and a mechanism may lack, whatever the model.
FEATURES = ("relative_bias", "shift_mask", "talking_heads", "pooling", "rotary", "temperature", "attention_dropout")


def convert(
    model: Annotated[str, typer.Argument(help="A timm model, or a folder that linvit saved.")] = "",
    to: Annotated[str, typer.Option(help="A plan, a mechanism, or a plan's JSON file.", metavar="PLAN")] = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="Where to save it.")] = None,
    keep: Annotated[int | None, typer.Option(help="So many layers stay quadratic (mixa) or as they are.")] = None,
    where: Annotated[str, typer.Option(help="Where --keep counts: first (unless told), last or alternating.")] = "",
    calibrate: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Measure on these images which layers mixa keeps.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="With --calibrate, a bar plot of it.")] = None,
    layers: Annotated[str, typer.Option(help="The layers to keep, from 0, with commas, in place of --keep.")] = "",
    drop: Annotated[str, typer.Option(help="What may be given up, with commas, such as relative_bias.")] = "",
    option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of the plan.")] = None,
    input_size: Annotated[str, typer.Option(help="Image size for positions, such as 384 or 384x512.")] = "",
    patch_size: Annotated[
        int | None, typer.Option(min=1, help="Resample the patch embedding, such as 16 to 14.")
    ] = None,
    window_size: Annotated[int | None, typer.Option(min=1, help="Resize Swin's windows, such as 7 to 14.")] = None,
    pretrained: Annotated[bool, typer.Option(help="Fetch timm's weights.")] = True,
    checkpoint: Annotated[Path | None, typer.Option(metavar="FILE", help="Weights to use instead of timm's.")] = None,
    model_arg: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An argument of timm.create_model.")
    ] = None,
    survey: Annotated[bool, typer.Option("--survey", help="Try every family of timm's models instead.")] = False,
    as_json: Json = False,
) -> None:
    """Swap the attention of a model by a plan, keep every weight, and say what changed.

    What the plan's mechanisms cannot honour is an error until --drop names it. `linvit list plans` shows the plans.

    \b
    Example: linvit convert deit_small_patch16_224 --to mixa --keep 6 -o deit_s_mixa
    """
    if survey:
        print_survey(as_json)
        return
    for given, wanted in ((model, "a MODEL"), (to, "--to PLAN"), (output, "-o DIR")):
        if not given:
            raise LinvitError(f"give {wanted}: linvit convert deit_small_patch16_224 --to mixa -o deit_s_mixa")
    assert output is not None
    import linvit
    from linvit.conversion import as_plan
    from linvit.conversion.opening import open_model

    if output.is_file():
        raise LinvitError(f"{output} is a file: give a folder")
    measured = None
    if calibrate is not None and (to != "mixa" or layers):
        raise LinvitError("--calibrate measures which layers mixa keeps: give --to mixa and no --layers")
    if plot is not None:
        check_picture(plot)
        if calibrate is None:
            raise LinvitError("--plot draws what --calibrate measures: give that too")
    options = pairs(option, "--option")
    if where and keep is None:
        raise LinvitError("--where places the layers that --keep counts: give --keep too")
    if calibrate is not None and (where or options.keys() & {"keep", "where"}):
        raise LinvitError("--calibrate measures which layers to keep: say how many with --keep, and not where")
    plan = read_plan(to, keep, where or "first", layers, options)
    features(drop)  # a wrong name is told before any weights are fetched
    size = image_size(input_size) if input_size else None
    args = pairs(model_arg, "--model-arg")
    instead = "--checkpoint FILE or --no-pretrained"
    built = open_model(model, pretrained=pretrained, args=args, checkpoint=checkpoint, instead=instead)
    resize(built, size, patch_size, window_size)
    with dropping(drop) as given_up:
        if calibrate is not None:
            measured = measure(built, calibrate, 6 if keep is None else keep, {*given_up, *plan.drop})
            plan = as_plan("mixa", **{**options, "keep": measured.keep})
        report = replace(linvit.convert(built, plan, drop=given_up, input_size=size), sensitivity=measured)
    linvit.save(built, output, model_args=None if Path(model).is_dir() else args)
    if as_json:
        print_json({"model": model, "output": str(output), **asdict(report)})
    else:
        print_report(report, output)
    if measured is not None and plot is not None:
        from linvit.figures.sensitivity import draw

        draw(measured, plot)


def measure(model: nn.Module, folder: Path, keep: int, drop: set[str]) -> Sensitivity:
    """The sensitivity of the layers on a folder's images, with a bar for the wait. The plan's option, a local branch,
    starts at zero and turns no outputs, so it is measured without."""
    from linvit.conversion.calibration import calibration_images
    from linvit.conversion.convert import find_hosts
    from linvit.conversion.sensitivity import measure_sensitivity, passes

    with progress("measuring layers", passes(len(find_hosts(model)), keep)) as advance:
        return measure_sensitivity(model, calibration_images(folder, model), keep=keep, drop=drop, advance=advance)


def read_plan(to: str, keep: int | None, where: str, layers: str, options: dict[str, Any]) -> Plan:
    """The plan by its name or from its file, with the layers to keep."""
    from linvit.conversion import Plan, Rule, as_plan
    from linvit.conversion.plan import Pick

    if keep is not None and layers:
        raise LinvitError("--keep counts layers and --layers names them: give one of the two")
    named = tuple(numbers(layers, least=0)) if layers else None
    if to == "mixa" and (named or keep is not None):
        if options.keys() & {"keep", "where"}:
            raise LinvitError("the layers to keep are given twice: give --keep and --where, or --layers, or --option")
        return as_plan("mixa", **options, **({"keep": named} if named else {"keep": keep, "where": where}))
    if to.endswith(".json"):
        try:
            plan = Plan.from_dict(json.loads(Path(to).read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise LinvitError(f"{to} is no plan: {error}") from None
        plan = as_plan(plan, **options)
    else:
        plan = as_plan(to, **options)
    kept = named if named or keep is None else Pick(keep, where)
    return plan if kept is None else replace(plan, rules=(Rule(None, layers=kept), *plan.rules))


def features(drop: str) -> list[str]:
    """The names in --drop; one that no model's attention has is a mistake."""
    named = [feature.strip() for feature in drop.split(",") if feature.strip()]
    for feature in named:
        if feature not in FEATURES:
            raise LinvitError(f"--drop: nothing is called '{feature}': give some of {', '.join(FEATURES)}")
    return named


@contextmanager
def dropping(drop: str) -> Iterator[list[str]]:
    """What --drop names; what it does not name and should is told as that option takes it."""
    given_up = features(drop)
    try:
        yield given_up
    except NotHonoured as lacking:
        together = ",".join([*given_up, *lacking.features])
        raise LinvitError(f"{lacking.reason}: --drop {together} gives up what it cannot") from None


def resize(model: nn.Module, size: tuple[int, int] | None, patch: int | None, window: int | None) -> None:
    """Resample what has a size, where that is asked for or the model fixes its image size."""
    from linvit.conversion import resample_patches, resample_windows

    if window is not None:
        resample_windows(model, window, size)
    if patch is not None or (size is not None and hasattr(model, "set_input_size")):
        embed: Any = model.patch_embed if hasattr(model, "patch_embed") else None
        resample_patches(model, patch or embed.patch_size[0], size)


def print_report(report: Report, folder: Path) -> None:
    made = table(layer=-5, name=20, before=10, after=16, note=10)
    for layer in report.layers:
        given_up = f"gave up {', '.join(layer.dropped)}" if layer.dropped else ""
        kept = f"left as it is: {layer.kept}" if layer.kept else ""
        after = layer.after if layer.after == layer.before else f"[bold]{layer.after}[/bold]"
        made.add_row(str(layer.index), layer.name, layer.before, after, given_up or kept)
    out = console()
    if report.sensitivity is not None:
        print_sensitivity(report.sensitivity)
    out.print(made)
    out.print(str(report).splitlines()[0])
    if report.removed:
        out.print(f"{len(report.removed)} parameters of dropped features are gone.")
    out.print(f"Saved to {folder}: linvit.load('{folder}') reads it.", style="italic")


def print_sensitivity(measured: Sensitivity) -> None:
    made = table(layer=-5, name=20, turn=-7, kept=-4, similarity=-10)
    for layer in measured.layers:
        reached = "" if layer.similarity is None else f"{layer.similarity:.4f}"
        made.add_row(str(layer.index), layer.name, f"{layer.turn:.4f}", str(layer.kept or ""), reached)
    out = console()
    out.print(made)
    out.print(
        f"“turn”: 1 − cosine of the outputs when only this layer is linear, {measured.images} images. “kept”: the "
        f"order in which layers were chosen to stay quadratic, with the similarity reached; "
        f"{measured.similarity:.4f} with none.",
        style="italic",
    )


def print_survey(as_json: bool) -> None:
    from linvit.conversion.survey import families, survey

    rows = []
    with progress("surveying", len(families())) as advance:
        for row in survey():
            rows.append(row)
            advance()
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    made = table(family=16, example=24, status=9, reason=30)
    colours = {"converted": "green", "partly": "yellow"}
    for row in rows:
        status = f"[{colours.get(row.status, 'red')}]{row.status}[/]"
        made.add_row(f"[bold]{row.family}[/bold]", row.example, status, row.reason)
    out = console()
    out.print(made)
    counts = {status: sum(row.status == status for row in rows) for status in ("converted", "partly", "refused")}
    out.print(f"{len(rows)} families: " + ", ".join(f"{count} {status}" for status, count in counts.items()) + ".")
