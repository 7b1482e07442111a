"""`linvit plan`: which layers to convert, by what each costs with each mechanism and how much the outputs mind."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linvit.cli import arguments
from linvit.cli.output import Json, console, print_json, progress, table
from linvit.errors import LinvitError

if TYPE_CHECKING:
    from linvit.attention import Size
    from linvit.conversion.planning import FrontPlan, LayerOption, Study


def plan(
    model: Annotated[str, typer.Argument(help=arguments.MODEL)],
    size: arguments.Size = "",
    candidates: Annotated[
        str, typer.Option("--plan", metavar="PLANS", help="What layers may become, such as stella,relu_linear:local=3.")
    ] = "",
    data: Annotated[Path | None, typer.Option(metavar="DIR", help="Images without labels, for the distances.")] = None,
    images: Annotated[int, typer.Option(min=1, help="So many of them.")] = 64,
    speedup: Annotated[float | None, typer.Option(min=1.0, help="The plan shall be so many times as fast.")] = None,
    budget_ms: Annotated[float | None, typer.Option(min=0.0, help="The plan shall take at most so long.")] = None,
    keep: Annotated[int, typer.Option(min=0, help="At least so many layers stay as they are.")] = 0,
    output: Annotated[Path | None, arguments.output("FILE", "The plan, as .json.")] = None,
    plot: arguments.Picture = None,
    drop: arguments.Drop = "",
    device: arguments.Device = "auto",
    batch: Annotated[int, typer.Option(min=0, help="Images at a time; 1 on a CPU and 8 on a GPU unless told.")] = 0,
    precision: Annotated[
        str, typer.Option(help="fp32, bf16 or fp16; fp32 on a CPU and bf16 on a GPU unless told.")
    ] = "",
    runtime: Annotated[str, typer.Option(help="How whole models are timed: eager, compiled or graph.")] = "eager",
    points: Annotated[int, typer.Option(min=2, help="So many plans are timed as whole models.")] = 8,
    checkpoint: Annotated[Path | None, typer.Option(metavar="FILE", help="Weights to use instead of timm's.")] = None,
    pretrained: arguments.Pretrained = True,
    model_arg: arguments.ModelArg = None,
    as_json: Json = False,
) -> None:
    """Measure every layer with every candidate at an image size, and find the plans that pay.

    Each layer and its converted self are timed by turns on the same input; with --data, also how far the outputs turn
    when only it is converted. Whole plans along the front are then timed beside the original. The plan chosen is the
    fastest, or with --speedup or --budget-ms the one of least distance that is fast enough; -o writes it for --plan of
    convert and train.

    \b
    Example: linvit plan deit_small_patch16_224 --size 448 --data photos --speedup 1.3 -o fast.json
    """
    from linvit.conversion import find_hosts, open_model, resample
    from linvit.conversion.calibration import calibration_images
    from linvit.conversion.convert import own_size
    from linvit.conversion.plan import split_plans
    from linvit.conversion.planning import CANDIDATES, study
    from linvit.conversion.planning.timing import Setting
    from linvit.figures import check_picture, plot_front
    from linvit.files import write_json
    from linvit.measurement.record import environment

    place = arguments.find_device(device)
    arguments.check_file(output)
    if output is not None and output.suffix != ".json":
        raise LinvitError(f"a plan is a .json file: -o {output.with_suffix('.json')}")
    if plot is not None:
        check_picture(plot)
    if speedup is not None and budget_ms is not None:
        raise LinvitError("--speedup and --budget-ms both say how fast: give one of the two")
    pixels, args = arguments.image_size(size) if size else None, arguments.pairs(model_arg, "--model-arg")
    named = split_plans(candidates) or list(CANDIDATES)
    with arguments.dropping(drop) as given_up:
        weights = pretrained and data is not None  # times do not depend on them
        instead = "--checkpoint FILE or --no-pretrained"
        built = open_model(model, pretrained=weights, args=args, checkpoint=checkpoint, instead=instead)
        resample(built, size=pixels)
        pixels = pixels or own_size(built)
        usual = Setting.usual(built, pixels, place)
        setting = Setting(pixels, place, batch or usual.batch, precision or usual.dtype, runtime)
        loader = None if data is None else calibration_images(data, built, images, size=pixels)
        total = min(points, len(find_hosts(built)) + 1) + len(named)
        with progress("measuring", total) as advance:
            found = study(
                built.to(place),
                setting,
                candidates=named,
                loader=loader,
                images=images,
                drop=given_up,
                keep=keep,
                points=points,
                advance=lambda what: advance(),
            )
    chosen = found.choose(speedup=speedup, budget_ms=budget_ms)
    if output is not None:
        write_json(output, chosen.plan.to_dict())
    if plot is not None:
        plot_front(found, chosen, plot)
    if as_json:
        print_json({"model": model, "environment": environment(place), **as_data(found), "plan": chosen.plan.to_dict()})
        return
    print_study(found, chosen)
    if output is not None:
        given = "".join(f" {option} {value}" for option, value in (("--size", size), ("--drop", drop)) if value)
        console().print(f"Plan: {output}; linvit convert {model}{given} --plan {output} -o DIR makes it.")


def as_data(found: "Study") -> dict[str, Any]:
    """What was measured, as plain data."""
    data = json.loads(json.dumps(asdict(found), default=str))
    data["front"] = [{**asdict(point), "plan": point.plan.to_dict()} for point in found.front]
    return {"study": data}


def print_study(found: "Study", chosen: "FrontPlan") -> None:
    out, setting = console(), found.setting
    names = [option.candidate for option in found.layers[0].options]
    rows = []
    for layer in found.layers:
        size = layer.cost.size
        shape = (tokens(size), size.heads, size.head_dim) if size is not None else ("", "", "")
        cells = [told(option) for option in layer.options]
        rows.append((layer.cost.index, *shape, f"{layer.cost.macs / 1e6:,.1f}", f"{layer.ms:.3g}", *cells))
    widths = {"layer": -5, "tokens": -8, "heads": -5, "width": -5, "MMACs": -7, "ms": -6, **dict.fromkeys(names, -9)}
    out.print(table(rows, **widths))
    out.print("× is the original's time over the candidate's, by turns.", style="italic")
    reasons = {o.refused: o.candidate for layer in found.layers for o in layer.options if o.refused}
    for reason in reasons:
        out.print(f"–: {reason}", style="italic")
    rows = []
    for point in found.front:
        mark = "◀ chosen" if point is chosen else ""
        turns = ["" if turn is None else f"{turn:.4f}" for turn in (point.predicted_turn, point.turn)]
        times = (f"{point.predicted_ms:.4g}", f"{point.ms:.4g}", f"{point.speedup:.2f}×")
        rows.append((point.converted, *times, *turns, mark))
    headings = {"layers converted": -8, "predicted ms": -9, "measured ms": -9, "speed": -6}
    out.print(table(rows, **headings, **{"predicted turn": -9, "measured turn": -9, " ": 8}))
    where = f"{setting.size[0]}×{setting.size[1]}, batch {setting.batch}, {setting.dtype}, {setting.mode}"
    about = f"Whole models at {where}, {found.ms:.4g} ms as it is."
    if found.images:
        about += f" “turn”: 1 − cosine of the outputs, {found.images} images, before any training."
    out.print(about, style="italic")
    for line in found.missed():
        out.print(f"Left although they are large: {line}")
    if not chosen.converted:
        out.print("Nothing pays at this size: the plan leaves every layer as it is.")


def told(option: "LayerOption") -> str:
    """A candidate in a cell: its speed, and the turn where images were given."""
    if option.refused:
        return "–"
    turn = "" if option.turn is None else f" {option.turn:.3f}"
    return f"{option.ratio:.2f}×{turn}"


def tokens(size: "Size") -> str:
    """`9 · 196` for windows, `3136 → 49` where keys are fewer."""
    shown = str(size.queries) if size.queries == size.keys else f"{size.queries} → {size.keys}"
    return shown if size.batch == 1 else f"{size.batch} · {shown}"
