"""`linvit bench op | model | scaling`: speed and memory, side by side in one run."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linvit.cli.arguments import ModelArg, numbers, pairs
from linvit.cli.convert import features
from linvit.cli.output import Json, print_json, progress
from linvit.errors import LinvitError, unknown

if TYPE_CHECKING:
    import torch

app = typer.Typer(no_args_is_help=True, help="Measure speed and memory against softmax, in one run.")

Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: cuda where there is one.")]
Dtype = Annotated[str | None, typer.Option(help="bf16, fp16 or fp32; bf16 on a GPU and fp32 on the CPU if not given.")]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", help="The result file; a name with the time if not given.")
]
Resume = Annotated[Path | None, typer.Option(help="Go on with this unfinished result file.")]
Budget = Annotated[float, typer.Option(help="Seconds to spend on each time.")]


@app.command("op")
def op(
    mechanism: Annotated[
        str, typer.Option("--mechanism", "-m", help="The mechanism, as `linvit list` names it.")
    ] = "stella",
    option: Annotated[list[str] | None, typer.Option(help="An option of the mechanism, name=value.")] = None,
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
    source: Annotated[Path | None, typer.Option("--from", help="Show this result file and measure nothing.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw time over tokens into this picture.")] = None,
    as_json: Json = False,
) -> None:
    """One mechanism beside SDPA, its reference, the compiled reference and the memory floor.

    Each is checked against float64 first; where the check is red no speed is printed and the exit code is 1.

    \b
    Example: linvit bench op --mechanism stella --batch 64 --heads 6 --tokens 196,784 --plot speed.png
    """
    from linvit.measurement import record, speed

    if source is not None:
        result = record.read_result(source, "bench op")
    else:
        place = find_device(device)
        kind = dtype or ("bf16" if place.type == "cuda" else "fp32")
        settings = {"mechanism": mechanism, "options": pairs(option, "--option"), "dtype": kind, "layout": "packed"}
        if preset is not None and preset not in speed.PRESETS:
            raise LinvitError(f"unknown preset '{preset}'; known: {', '.join(speed.PRESETS)}")
        over = speed.PRESETS[preset] if preset else []
        over = over or speed.shapes(*(numbers(t) for t in (batch, heads, head_dim, tokens)))
        over = [replace(shape, bias=bias) for shape in over]
        wanted, which = _words(compared), _words(passes, speed.PASSES)
        result = _measure_op(settings, over, which, wanted, place, budget, output, resume)
    if plot is not None:
        from linvit.figures.speed import plot_op

        plot_op(result, plot)
    if as_json:
        print_json(result)
    else:
        from linvit.cli.bench_output import print_op

        print_op(result)
    if any(row["status"] == "wrong" for row in result["rows"]):
        raise typer.Exit(1)


def _measure_op(
    settings: dict[str, Any],
    over: list[Any],
    passes: tuple[str, ...],
    compared: tuple[str, ...],
    device: torch.device,
    budget: float,
    output: Path | None,
    resume: Path | None,
) -> dict[str, Any]:
    from linvit.measurement import clock, record, speed

    head = {"kind": "bench op", "version": 1, **settings}
    path = resume or output or default_path(f"bench-op-{settings['mechanism']}")
    file = record.ResultFile(path, head, record.environment(device), resume=resume is not None)
    file.data.setdefault("floor_elements", speed.ELEMENTS)
    file.data.setdefault("bandwidth", clock.copy_bandwidth(device))
    done = frozenset(
        tuple(r[n] for n in ("batch", "heads", "head_dim", "tokens", "bias", "implementation", "pass"))
        for r in file.rows
    )
    rows = speed.sweep(
        settings["mechanism"],
        over,
        dtype=settings["dtype"],
        options=settings["options"],
        device=device,
        passes=passes,
        compared=compared,
        done=done,
        budget=budget,
    )
    with progress(f"timing {settings['mechanism']}", len(over) * len(passes) * len(compared) - len(done)) as advance:
        for row in rows:
            file.add(row)
            advance()
    return file.finish()


@app.command("model")
def model(
    name: Annotated[str, typer.Argument(help="A timm model, such as deit_small_patch16_224.")] = "",
    to: Annotated[str, typer.Option(help="The mechanism or plan to convert to.")] = "stella",
    keep: Annotated[
        int | None, typer.Option(help="How many layers keep their attention, for plans that keep some.")
    ] = None,
    drop: Annotated[str, typer.Option(help="What the conversion may give up, with commas.")] = "",
    model_arg: ModelArg = None,
    resolution: Annotated[str, typer.Option(help="Image sizes in pixels, with commas.")] = "224",
    batch: Annotated[str, typer.Option(help="Batch size: one, or one per resolution.")] = "64",
    passes: Annotated[str, typer.Option(help="inference, training, or both.")] = "inference,training",
    modes: Annotated[str, typer.Option(help="eager, compiled, or graph: as a CUDA graph.")] = "eager,compiled",
    dtype: Dtype = None,
    device: Device = "auto",
    budget: Budget = 1.0,
    output: Output = None,
    resume: Resume = None,
    source: Annotated[Path | None, typer.Option("--from", help="Show this result file and measure nothing.")] = None,
    as_json: Json = False,
) -> None:
    """A timm model with softmax attention beside its converted self: images per second and peak memory.

    \b
    Example: linvit bench model deit_tiny_patch16_224 --to stella --resolution 224,448 --batch 8
    Example: linvit bench model swin_tiny_patch4_window7_224 --to stella --drop relative_bias,shift_mask
    """
    import linvit
    from linvit.measurement import model_speed, record

    if source is not None:
        result = record.read_result(source, "bench model")
    elif not name:
        raise LinvitError("give a timm model, such as deit_small_patch16_224, or --from FILE")
    else:
        place = find_device(device)
        kind = dtype or ("bf16" if place.type == "cuda" else "fp32")
        resolutions, batches = numbers(resolution), numbers(batch)
        if len(batches) == 1:
            batches *= len(resolutions)
        if len(batches) != len(resolutions):
            raise LinvitError(f"give one batch size, or {len(resolutions)}: one per resolution")
        options: dict[str, Any] = {} if keep is None else {"keep": keep}
        if given_up := features(drop):
            options["drop"] = given_up
        args = pairs(model_arg, "--model-arg")
        head = {"kind": "bench model", "version": 1, "model": name, "to": to, "options": options, "dtype": kind}
        head |= {"args": args} if args else {}
        path = resume or output or default_path(f"bench-model-{name}-{to}")
        file = record.ResultFile(path, head, record.environment(place), resume=resume is not None)
        which, how = _words(passes, model_speed.PASSES), _words(modes, model_speed.MODES)
        rows = model_speed.sweep(
            name,
            lambda m: linvit.convert(m, to, **options),
            resolutions=resolutions,
            batches=batches,
            dtype=kind,
            device=place,
            passes=which,
            modes=how,
            args=args,
            done=frozenset(model_speed.key(row) for row in file.rows),
            budget=budget,
        )
        with progress(f"timing {name}", 2 * len(resolutions) * len(which) * len(how) - len(file.rows)) as advance:
            for row in rows:
                file.add(row)
                advance()
        result = file.finish()
    if as_json:
        print_json(result)
    else:
        from linvit.cli.bench_output import print_model

        print_model(result)
    if any(row["status"] == "wrong" for row in result["rows"]):
        raise typer.Exit(1)


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
    results = []
    with progress("doubling the tokens", len(found)) as advance:
        for name, variant in found:
            results.append(measurement.scaling(name, variant, tokens=tokens))
            advance()
    if as_json:
        print_json(
            [
                {"mechanism": r.name, "variant": r.variant, "tokens": [r.tokens, 2 * r.tokens]}
                | {"ms": [r.single_ms, r.double_ms], "ratio": r.ratio, "limit": measurement.LIMIT, "linear": r.linear}
                for r in results
            ]
        )
    else:
        print_scaling(results)
    if not all(r.linear for r in results):
        raise typer.Exit(1)


def find_device(name: str) -> torch.device:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name not in ("cpu", "cuda"):
        raise LinvitError(f"unknown device '{name}'; known: auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise LinvitError("there is no CUDA device here: use --device cpu")
    return torch.device(name)


def _words(text: str, known: tuple[str, ...] = ("ours", "sdpa", "reference", "compiled")) -> tuple[str, ...]:
    words = tuple(part.strip() for part in text.split(","))
    for word in words:
        if word not in known:
            raise unknown("choice", word, known)
    return words


def default_path(stem: str) -> Path:
    return Path(f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
