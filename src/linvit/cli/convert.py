"""`linvit convert`: swap the attention of a model, keep the weights, save the result."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linvit.cli import arguments
from linvit.cli.output import Json, console, print_json, progress, table, tracked
from linvit.errors import LinvitError

if TYPE_CHECKING:
    from linvit.conversion import Report, Sensitivity


def convert(
    model: Annotated[str, typer.Argument(help="A timm model, or a folder that linvit saved.")] = "",
    plan: arguments.PlanText = "",
    output: Annotated[Path | None, typer.Option("--output", "-o", metavar="DIR", help="Where to save it.")] = None,
    keep: arguments.Keep = None,
    where: Annotated[str, typer.Option(help="Where --keep counts: first (unless told), last or alternating.")] = "",
    calibrate: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Images that tell which layers to keep.")
    ] = None,
    plot: arguments.Picture = None,
    layers: Annotated[str, typer.Option(help="The layers to keep, from 0, with commas, in place of --keep.")] = "",
    drop: arguments.Drop = "",
    option: arguments.PlanOptions = None,
    size: arguments.Size = "",
    patch_size: Annotated[int | None, typer.Option(min=1, help="Resample the patch embedding to this.")] = None,
    window_size: Annotated[int | None, typer.Option(min=1, help="Resize Swin's windows, such as 7 to 14.")] = None,
    pretrained: arguments.Pretrained = True,
    checkpoint: Annotated[Path | None, typer.Option(metavar="FILE", help="Weights to use instead of timm's.")] = None,
    model_arg: arguments.ModelArg = None,
    survey: Annotated[bool, typer.Option("--survey", help="Try every family of timm's models instead.")] = False,
    as_json: Json = False,
) -> None:
    """Swap the attention of a model by a plan, keep every weight, and say what changed.

    What the plan's mechanisms cannot honour is an error until --drop names it. --plan auto converts the layers that are
    measured to get faster, and no other. With --calibrate the layers that a plan keeps are measured, and --plot draws
    that. `linvit list plans` shows the plans.

    \b
    Example: linvit convert deit_small_patch16_224 --plan mixa --keep 6 -o deit_s_mixa
    """
    if survey:
        print_survey(as_json)
        return
    for given, wanted in ((model, "a MODEL"), (plan, "--plan PLAN"), (output, "-o DIR")):
        if not given:
            raise LinvitError(f"give {wanted}: linvit convert deit_small_patch16_224 --plan mixa -o deit_s_mixa")
    assert output is not None
    from linvit.conversion import convert as swap
    from linvit.conversion import find_hosts, open_model, parse_plan, resample, save
    from linvit.conversion.calibration import calibration_images
    from linvit.conversion.resolving import layers_to_measure
    from linvit.conversion.sensitivity import passes
    from linvit.figures import check_picture, plot_sensitivity

    if output.is_file():
        raise LinvitError(f"{output} is a file: give a folder")
    if plot is not None:
        check_picture(plot)
        if calibrate is None:
            raise LinvitError("--plot draws what --calibrate measures: give that too")
    chosen = parse_plan(plan, **arguments.plan_options(option, keep, where, layers))
    count = 0 if calibrate is None else layers_to_measure(chosen)
    pixels, args = arguments.image_size(size) if size else None, arguments.pairs(model_arg, "--model-arg")
    with arguments.dropping(drop) as given_up:
        instead = "--checkpoint FILE or --no-pretrained"
        built = open_model(model, pretrained=pretrained, args=args, checkpoint=checkpoint, instead=instead)
        resample(built, size=pixels, patch_size=patch_size, window_size=window_size)
        if calibrate is None:
            report = swap(built, chosen, drop=given_up, size=pixels, costs=True)
        else:
            images = calibration_images(calibrate, built)
            with progress("measuring layers", passes(len(find_hosts(built)), count)) as advance:
                report = swap(built, chosen, drop=given_up, size=pixels, calibrate=images, advance=advance, costs=True)
    save(built, output, model_args=None if Path(model).is_dir() else args)
    if as_json:
        print_json({"model": model, "output": str(output), **asdict(report)})
    else:
        print_report(report, output)
    if report.sensitivity is not None and plot is not None:
        plot_sensitivity(report.sensitivity, plot)


def print_report(report: "Report", folder: Path) -> None:
    rows = []
    for layer in report.layers:
        after = layer.after if layer.after == layer.before else f"[bold]{layer.after}[/bold]"
        macs = "" if layer.macs is None else " → ".join(f"{macs / 1e6:,.1f}" for macs in dict.fromkeys(layer.macs))
        rows.append((layer.index, layer.name, layer.before, after, layer.tokens or "", macs, "; ".join(layer.notes)))
    out = console()
    if report.sensitivity is not None:
        print_sensitivity(report.sensitivity)
    out.print(table(rows, layer=-5, name=18, before=8, after=12, tokens=-6, MMACs=-7, note=4))
    out.print(str(report).splitlines()[0])
    if report.removed:
        out.print(report.losses)
    for line in report.advice:
        out.print(line, markup=False)
    out.print(f"Saved to {folder}: linvit.load('{folder}') reads it.", style="italic")


def print_sensitivity(measured: "Sensitivity") -> None:
    rows = []
    for layer in measured.layers:
        reached = "" if layer.similarity is None else f"{layer.similarity:.4f}"
        rows.append((layer.index, layer.name, f"{layer.turn:.4f}", layer.kept or "", reached))
    out = console()
    out.print(table(rows, layer=-5, name=20, turn=-7, kept=-4, similarity=-10))
    out.print(
        f"“turn”: 1 − cosine of the outputs when only this layer is linear, {measured.images} images. “kept”: the "
        f"order in which layers were chosen to stay quadratic, with the similarity reached; "
        f"{measured.similarity:.4f} with none.",
        style="italic",
    )


def print_survey(as_json: bool) -> None:
    from linvit.conversion.surveying import families, survey

    found = list(tracked(survey(), "surveying", len(families())))
    if as_json:
        print_json([asdict(row) for row in found])
        return
    colours = {"converted": "green", "partly": "yellow", "refused": "red"}
    rows = [(f"[bold]{r.family}[/]", r.example, f"[{colours[r.status]}]{r.status}[/]", r.reason) for r in found]
    counts = Counter(row.status for row in found)
    out = console()
    out.print(table(rows, family=16, example=24, status=9, reason=30))
    out.print(f"{len(found)} families: " + ", ".join(f"{counts[status]} {status}" for status in colours) + ".")
