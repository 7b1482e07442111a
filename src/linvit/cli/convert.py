"""`linvit convert`: swap the attention of a model, keep the weights, save the result."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linvit.cli import arguments
from linvit.cli.output import Json, console, print_json, progress, styled, table, tracked
from linvit.errors import LinvitError

if TYPE_CHECKING:
    from linvit.conversion import Report, Sensitivity


def convert(
    model: Annotated[str, typer.Argument(help=arguments.MODEL)] = "",
    plan: arguments.PlanText = "",
    output: Annotated[Path | None, arguments.output("DIR", "Where to save it.")] = None,
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
    device: arguments.Device = "auto",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would change, and save nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model that DIR holds.")] = False,
    survey: Annotated[bool, typer.Option("--survey", help="Try every family of timm's models instead.")] = False,
    as_json: Json = False,
) -> None:
    """Swap the attention of a model by a plan, keep every weight, and say what changed.

    What a mechanism cannot honour, a relative bias say, is an error unless --drop names it or the plan gives it up: the
    papers' plans go without what their papers do, `linvit list plans` shows what, and the output says so. --plan auto
    converts the layers that are measured to get faster on --device, and no other. With --calibrate the layers that a
    plan keeps are measured, and --plot draws that. With --dry-run nothing is fetched (but to measure layers) and
    nothing saved.

    \b
    Example: linvit convert deit_small_patch16_224 --plan mixa --keep 6 -o deit_s_mixa
    Example: linvit convert google/vit-base-patch16-224 --plan stella -o vit_stella
    """
    if survey:
        print_survey(as_json)
        return
    for given, wanted in ((model, "a MODEL"), (plan, "--plan PLAN"), (output or dry_run, "-o DIR")):
        if not given:
            raise LinvitError(f"give {wanted}: linvit convert deit_small_patch16_224 --plan mixa -o deit_s_mixa")
    from linvit.conversion import convert as swap
    from linvit.conversion import find_hosts, open_model, parse_plan, resample, save
    from linvit.conversion.calibration import calibration_images
    from linvit.conversion.plan import Auto
    from linvit.conversion.rebuilding import origin
    from linvit.conversion.resolving import layers_to_measure
    from linvit.conversion.sensitivity import passes
    from linvit.figures import check_picture, plot_sensitivity

    if output is not None:
        check_folder(output, overwrite)
    if plot is not None:
        check_picture(plot)
        if calibrate is None:
            raise LinvitError("--plot draws what --calibrate measures: give that too")
    chosen = parse_plan(plan, **arguments.plan_options(option, keep, where, layers))
    place = arguments.find_device(device)
    count = 0 if calibrate is None else layers_to_measure(chosen)
    pixels, args = arguments.image_size(size) if size else None, arguments.pairs(model_arg, "--model-arg")
    with arguments.dropping(drop) as given_up:
        instead = "--checkpoint FILE or --no-pretrained"
        fetched = pretrained and (not dry_run or calibrate is not None)
        built = open_model(model, pretrained=fetched, args=args, checkpoint=checkpoint, instead=instead)
        resample(built, size=pixels, patch_size=patch_size, window_size=window_size)
        if calibrate is not None or isinstance(chosen, Auto):
            built.to(place)
        if calibrate is None:
            report = swap(built, chosen, drop=given_up, size=pixels, costs=True)
        else:
            images = calibration_images(calibrate, built, size=pixels)
            with progress("measuring layers", passes(len(find_hosts(built)), count)) as advance:
                report = swap(built, chosen, drop=given_up, size=pixels, calibrate=images, advance=advance, costs=True)
    named = None if Path(model).is_dir() else args
    saved = None if dry_run else output
    if saved is None:
        origin(built, args=named)  # what keeps a model from being saved is told as well
    else:
        save(built, saved, model_args=named)
    if as_json:
        print_json({"model": model, "output": None if saved is None else str(saved), **asdict(report)})
    else:
        print_report(report, saved)
    if report.sensitivity is not None and plot is not None:
        plot_sensitivity(report.sensitivity, plot)


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raise unless a model can be saved here without loss. Asked before the work."""
    if folder.is_file():
        raise LinvitError(f"{folder} is a file: give a folder")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise LinvitError(f"{folder} is there and not empty: give another folder, or --overwrite")


def print_report(report: "Report", folder: Path | None) -> None:
    rows = []
    for layer in report.layers:
        after = layer.after if layer.after == layer.before else styled((layer.after, "bold"))
        macs = "" if layer.macs is None else " → ".join(f"{macs / 1e6:,.1f}" for macs in dict.fromkeys(layer.macs))
        rows.append((layer.index, layer.name, layer.before, after, layer.tokens or "", macs, "; ".join(layer.notes)))
    out = console()
    if report.sensitivity is not None:
        print_sensitivity(report.sensitivity)
    out.print(table(rows, layer=-5, name=12, before=7, after=8, tokens=-6, MMACs=-7, note=8))
    out.print(str(report).splitlines()[0])
    for line in (*report.losses, *report.advice):
        out.print(line)
    if folder is None:
        out.print("A dry run: nothing was saved.", style="italic")
    else:
        out.print(styled((f"Saved to {folder}: linvit.load({str(folder)!r}) reads it.", "italic")))


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
    rows = [(styled((r.family, "bold")), r.example, styled((r.status, colours[r.status])), r.reason) for r in found]
    counts = Counter(row.status for row in found)
    out = console()
    out.print(table(rows, family=16, example=24, status=9, reason=30))
    out.print(f"{len(found)} families: " + ", ".join(f"{counts[status]} {status}" for status in colours) + ".")
