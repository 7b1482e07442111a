"""`linvit bench op | model | scaling`: speed and memory, side by side in one run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from linvit.cli.arguments import (
    Device,
    Drop,
    Keep,
    ModelArg,
    PlanOptions,
    PlanText,
    Sizes,
    find_device,
    image_sizes,
    numbers,
    pairs,
    words,
)
from linvit.cli.convert import dropping, read_plan
from linvit.cli.output import Json, print_json, tracked
from linvit.errors import LinvitError

app = typer.Typer(no_args_is_help=True, help="Measure speed and memory against softmax, in one run.")

Dtype = Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; bf16 on a GPU and fp32 on the CPU if not given.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The result file; a name with the time if not given.")
]
Resume = Annotated[Path | None, typer.Option(help="Go on with this unfinished result file.")]
Source = Annotated[Path | None, typer.Option("--from", help="Show this result file and measure nothing.")]
Budget = Annotated[float, typer.Option(help="Seconds to spend on each time.")]


@app.command("op")
def op(
    mechanism: Annotated[
        str, typer.Option("--mechanism", "-m", help="The mechanism, as `linvit list` names it.")
    ] = "stella",
    option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of the mechanism.")] = None,
    preset: Annotated[str | None, typer.Option(help="deit, grid or cpu: shapes to choose at once.")] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1",
    heads: Annotated[str, typer.Option(help="Numbers of heads.")] = "6",
    head_dim: Annotated[str, typer.Option(help="Channels per head.")] = "64",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens.")] = "196,784",
    bias: Annotated[bool, typer.Option("--bias", help="With a learned bias that images share, as in Swin.")] = False,
    passes: Annotated[str, typer.Option(help="forward, forward+backward, or both.")] = "forward,forward+backward",
    compared: Annotated[
        str, typer.Option(help="What to measure, of ours, sdpa, reference and compiled.")
    ] = "ours,sdpa,reference,compiled",
    dtype: Dtype = None,
    device: Device = "auto",
    budget: Budget = 0.2,
    output: Output = None,
    resume: Resume = None,
    source: Source = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time over tokens into this picture.")] = None,
    as_json: Json = False,
) -> None:
    """One mechanism beside SDPA, its reference, the compiled reference and the memory floor.

    Each is checked against float64 first; where the check is red no speed is printed and the exit code is 1.

    \b
    Example: linvit bench op --mechanism stella --batch 64 --heads 6 --tokens 196,784 --plot speed.png
    """
    from linvit.cli.bench_output import print_op
    from linvit.figures import check_picture, plot_op
    from linvit.measurement import clock, record, speed

    if plot is not None:
        check_picture(plot)
    if source is not None:
        result = record.read_result(source, "bench op")
    else:
        place = find_device(device)
        if preset is not None and preset not in speed.PRESETS:
            raise LinvitError(f"unknown preset '{preset}'; known: {', '.join(speed.PRESETS)}")
        over = speed.PRESETS[preset] if preset else []
        over = over or speed.shapes(*(numbers(text) for text in (batch, heads, head_dim, tokens)))
        over = [replace(shape, bias=bias) for shape in over]
        settings: dict[str, Any] = {"mechanism": mechanism, "options": pairs(option, "--option")}
        settings["dtype"] = dtype or ("bf16" if place.type == "cuda" else "fp32")
        wanted, which = words(compared, speed.IMPLEMENTATIONS), words(passes, speed.PASSES)
        path = resume or output or default_path(f"bench-op-{mechanism}")
        head = {"kind": "bench op", "version": 1, **settings, "layout": "packed"}
        file = record.ResultFile(path, head, record.environment(place), resume=resume is not None)
        file.data.setdefault("floor_elements", speed.ELEMENTS)
        file.data.setdefault("bandwidth", clock.copy_bandwidth(place))
        done = frozenset(speed.key(row) for row in file.rows)
        rows = speed.sweep(over=over, device=place, passes=which, compared=wanted, done=done, budget=budget, **settings)
        left = len(over) * len(which) * len(wanted) - len(done)
        result = file.fill(tracked(rows, f"timing {mechanism}", left))
    if plot is not None:
        plot_op(result, plot)
    finish(result, print_op, as_json)


@app.command("model")
def model(
    name: Annotated[str, typer.Argument(help="A timm model, such as deit_small_patch16_224.")] = "",
    plan: PlanText = "stella",
    option: PlanOptions = None,
    keep: Keep = None,
    drop: Drop = "",
    model_arg: ModelArg = None,
    size: Sizes = "224",
    batch: Annotated[str, typer.Option(help="Batch size: one, or one for each size.")] = "64",
    passes: Annotated[str, typer.Option(help="inference, training, or both.")] = "inference,training",
    modes: Annotated[str, typer.Option(help="eager, compiled, or graph: as a CUDA graph.")] = "eager,compiled",
    dtype: Dtype = None,
    device: Device = "auto",
    budget: Budget = 1.0,
    output: Output = None,
    resume: Resume = None,
    source: Source = None,
    as_json: Json = False,
) -> None:
    """A timm model with softmax attention beside its converted self: images per second and peak memory.

    \b
    Example: linvit bench model deit_tiny_patch16_224 --plan stella --size 224,448 --batch 8
    Example: linvit bench model swin_tiny_patch4_window7_224 --plan stella --drop relative_bias,shift_mask
    """
    from linvit.cli.bench_output import print_model
    from linvit.conversion import convert
    from linvit.measurement import model_speed, record

    if source is not None:
        finish(record.read_result(source, "bench model"), print_model, as_json)
        return
    if not name:
        raise LinvitError("give a timm model, such as deit_small_patch16_224, or --from FILE")
    place, sizes, batches = find_device(device), image_sizes(size), numbers(batch)
    if len(batches) == 1:
        batches *= len(sizes)
    if len(batches) != len(sizes):
        raise LinvitError(f"give one batch size, or {len(sizes)}: one for each size")
    options, args = pairs(option, "--option"), pairs(model_arg, "--model-arg")
    chosen = read_plan(plan, keep, "first", "", options)
    which, how = words(passes, model_speed.PASSES), words(modes, model_speed.MODES)
    with dropping(drop) as given_up:
        told = options | ({} if keep is None else {"keep": keep}) | ({"drop": given_up} if given_up else {})
        kind = dtype or ("bf16" if place.type == "cuda" else "fp32")
        head = {"kind": "bench model", "version": 1, "model": name, "to": plan, "options": told, "dtype": kind}
        head |= {"args": args} if args else {}
        path = resume or output or default_path(f"bench-model-{name}-{chosen.name}")
        file = record.ResultFile(path, head, record.environment(place), resume=resume is not None)
        rows = model_speed.sweep(
            name,
            lambda built: convert(built, chosen, drop=given_up),
            sizes=sizes,
            batches=batches,
            dtype=kind,
            device=place,
            passes=which,
            modes=how,
            args=args,
            done=frozenset(model_speed.key(row) for row in file.rows),
            budget=budget,
        )
        left = 2 * len(sizes) * len(which) * len(how) - len(file.rows)
        result = file.fill(tracked(rows, f"timing {name}", left))
    finish(result, print_model, as_json)


@app.command("scaling")
def scaling(
    mechanism: Annotated[
        list[str] | None, typer.Option("--mechanism", "-m", help="Only these; all linear ones if not given.")
    ] = None,
    tokens: Annotated[int, typer.Option(help="N; the other size is twice that.")] = 4096,
    as_json: Json = False,
) -> None:
    """Check on the CPU that every mechanism declared linear is: twice the tokens, less than 2.6 times the time.

    \b
    Example: linvit bench scaling --mechanism stella
    """
    from linvit.cli.bench_output import print_scaling
    from linvit.measurement import scaling as measurement

    found = measurement.linear_mechanisms()
    for name in mechanism or []:
        if name not in {n for n, _ in found}:
            raise LinvitError(f"'{name}' is not a mechanism that is declared linear; see `linvit list`")
    found = [(n, v) for n, v in found if not mechanism or n in mechanism]
    measured = (measurement.scaling(name, variant, tokens) for name, variant in found)
    results = list(tracked(measured, "doubling the tokens", len(found)))
    if as_json:
        print_json(results)
    else:
        print_scaling(results)
    if not all(result["linear"] for result in results):
        raise typer.Exit(1)


def finish(result: dict[str, Any], print_result: Callable[[dict[str, Any]], None], as_json: bool) -> None:
    """Print a result; what was measured to be wrong makes the exit code 1."""
    if as_json:
        print_json(result)
    else:
        print_result(result)
    if any(row["status"] == "wrong" for row in result["rows"]):
        raise typer.Exit(1)


def default_path(stem: str) -> Path:
    return Path(f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
