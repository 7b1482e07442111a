"""`linvit bench edge`: one image through a model and its converted selves, in the runtimes that devices have."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from linvit.cli import arguments
from linvit.cli.bench import Budget, Output, Resume, Source, app, finish, open_result
from linvit.cli.bench_output import MEBI, digits, number, print_table, where
from linvit.cli.output import Json, tracked
from linvit.errors import LinvitError

KIND = "bench edge"


@app.command("edge", short_help="Latency of one image in each runtime.")
def edge(
    name: Annotated[str, typer.Argument(help="A timm model, such as deit_tiny_patch16_224.")] = "",
    plan: arguments.PlanTexts = "mixa,stella",
    option: arguments.PlanOptions = None,
    keep: arguments.Keep = None,
    drop: arguments.Drop = "",
    model_arg: arguments.ModelArg = None,
    size: arguments.Sizes = "224",
    threads: Annotated[str, typer.Option(help="Numbers of threads, with commas.")] = "1",
    runtime: Annotated[
        str, typer.Option(help="Of eager, compiled, onnx, openvino and executorch, with commas.")
    ] = "eager,onnx,openvino",
    files: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the exported files here; those that are there are used.")
    ] = None,
    budget: Budget = 3.0,
    output: Output = None,
    resume: Resume = None,
    source: Source = None,
    plot: arguments.Picture = None,
    as_json: Json = False,
) -> None:
    """The latency of one image on this CPU: a timm model beside its converted selves, by turns in one run.

    Each is exported as `linvit export` does it, verified, and opened in a process of its own. In eager PyTorch also
    the share of the time that attention takes is measured, layer by layer. The ratio is the original's time divided by
    the converted model's. The plan auto leaves a model as it is in a runtime where it would not be faster.

    \b
    Example: linvit bench edge deit_tiny_patch16_224 --plan mixa:keep=6,stella --size 224,448 --plot edge.png
    """
    from linvit.conversion import convert, parse_plan
    from linvit.conversion.plan import split_plans
    from linvit.figures import check_picture, plot_edge
    from linvit.measurement import record
    from linvit.runtimes import latency

    if plot is not None:
        check_picture(plot)
    if source is not None:
        result = record.read_result(source, KIND)
    else:
        if not name:
            raise LinvitError("give a timm model, such as deit_tiny_patch16_224, or --from FILE")
        options = arguments.plan_options(option, keep)
        plans = {text: parse_plan(text, **options) for text in split_plans(plan)}
        sizes = [arguments.image_size(part) for part in size.split(",")]
        counts, which = arguments.numbers(threads), arguments.words(runtime, latency.RUNTIMES)
        args = arguments.pairs(model_arg, "--model-arg")
        with arguments.dropping(drop) as given_up:
            versions = {package: record.package(package) for package in ("onnxruntime", "openvino", "executorch")}
            head = {"kind": KIND, "version": 1, "model": name, "args": args, "plans": list(plans), "drop": given_up}
            head |= {"options": options} if options else {}
            file = open_result(output, resume, name, {**head, "versions": versions}, arguments.find_device("cpu"))
            swaps = {text: partial(convert, plan=chosen, drop=given_up) for text, chosen in plans.items()}
            grid: dict[str, Any] = {"sizes": sizes, "threads": counts, "runtimes": which, "args": args}
            done = frozenset(latency.key(row) for row in file.rows)
            rows = latency.sweep(name, swaps, **grid, done=done, budget=budget, files=files)
            left = (1 + len(plans)) * len(sizes) * len(counts) * len(which) - len(done)
            result = file.fill(tracked(rows, f"timing {name}", left))
    if plot is not None:
        plot_edge(result, plot)
    finish(result, print_edge, as_json)


def print_edge(result: dict[str, Any]) -> None:
    """One line per model. The shares are of attention without and with its projections."""
    from linvit.runtimes.latency import share

    print(f"{result['model']}, one image, fp32, {where(result)}")
    made = []
    for row in result["rows"]:
        cells = [row["resolution"], row["threads"], row["runtime"], row["attention"]]
        if row["status"] != "ok":
            made.append([*cells, row["status"], row.get("reason", ""), "", "", "", "", "", ""])
            continue
        parts = [share(row), share(row, "ms")]
        shares = "" if parts[0] is None else " / ".join(f"{part:.0%}" for part in parts if part is not None)
        cells += [digits(row["ms"]["p50"]), digits(row["ms"]["p90"]), number(row.get("ratio"))]
        cells += [digits(row["cpu_ms"]["p50"]), number(row.get("cpu_ratio"))]
        made.append([*cells, f"{row['peak_bytes'] / MEBI:,.0f}", f"{row['file_bytes'] / MEBI:.1f}", shares])
    headings = (
        "pixels",
        "threads",
        "runtime",
        "attention",
        "p50, ms",
        "p90, ms",
        "ratio",
        "CPU, ms",
        "ratio ",
        "peak MiB",
        "file MiB",
    )
    print_table(made, *headings, "attention's share")
