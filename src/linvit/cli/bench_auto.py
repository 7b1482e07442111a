"""`linvit bench auto`: what the plan `auto` buys, model by model."""

from typing import Annotated, Any

import typer

from linvit.cli import arguments
from linvit.cli.bench import Budget, Output, Resume, Source, finish, open_result
from linvit.cli.bench_edge import app
from linvit.cli.bench_output import digits, number, print_table, where
from linvit.cli.output import Json, tracked
from linvit.errors import LinvitError

KIND = "bench auto"


@app.command("auto", short_help="What the plan auto buys, model by model.")
def auto(
    names: Annotated[str, typer.Argument(metavar="MODEL,…", help="timm models, with commas.")] = "",
    size: arguments.Sizes = "224",
    candidates: Annotated[
        str, typer.Option("--plan", metavar="PLANS", help="What layers may become, such as stella,relu_linear:local=3.")
    ] = "",
    drop: arguments.Drop = "",
    batch: Annotated[int, typer.Option(min=0, help="Images at a time; 1 on a CPU and 8 on a GPU unless told.")] = 0,
    device: arguments.Device = "auto",
    budget: Budget = 0.2,
    output: Output = None,
    resume: Resume = None,
    source: Source = None,
    as_json: Json = False,
) -> None:
    """What `--plan auto` converts of each model at each size, the MACs of its attention, and the measured speed.

    Layers are timed with every candidate by turns, and the whole model with the plan beside the original. A layer that
    a candidate would make slower stays as it is, and one with a relative bias, say, unless --drop names that.

    \b
    Example: linvit bench auto deit_tiny_patch16_224,swin_tiny_patch4_window7_224 --size 224,1024
    """
    from linvit.conversion.plan import AUTO, split_plans
    from linvit.measurement import auto_speed, record

    if source is not None:
        finish(record.read_result(source, KIND), print_auto, as_json)
        return
    models = [name for name in names.split(",") if name]
    if not models:
        raise LinvitError("give timm models, such as deit_tiny_patch16_224,pvt_v2_b0, or --from FILE")
    place, sizes = arguments.find_device(device), [arguments.image_size(part) for part in size.split(",")]
    named = split_plans(candidates) or list(AUTO)
    with arguments.dropping(drop) as given_up:
        head = {"kind": KIND, "version": 1, "candidates": named, "drop": given_up}
    file = open_result(output, resume, "auto", head, place)
    done = {auto_speed.key(row) for row in file.rows}
    how: dict[str, Any] = {"candidates": named, "drop": given_up, "done": done, "budget": budget}
    rows = auto_speed.sweep(models, sizes, place, batch=batch or None, **how)
    finish(file.fill(tracked(rows, "timing", len(models) * len(sizes) - len(done))), print_auto, as_json)


def print_auto(result: dict[str, Any]) -> None:
    """One line per model and size; below, why layers that should suit were left."""
    without = f" without {', '.join(result['drop'])}" if result.get("drop") else ""
    print(f"what auto converts{without}, {where(result)}")
    made, left = [], []
    for row in result["rows"]:
        cells = [row["model"], row["resolution"]]
        if row["status"] != "ok":
            made.append([*cells, "", "", row.get("reason", row["status"]), "", ""])
            continue
        plan = ", ".join(f"{count} {name}" for name, count in row["plan"].items()) or "nothing"
        macs = f"{row['macs'] / 1e9:.3g} → {row['macs_converted'] / 1e9:.3g}"
        made.append([*cells, row["layers"], row["large"], plan, macs, digits(row["ms"]), number(row["ratio"])])
        left += [f"{row['model']} at {row['resolution']}: {reason}" for reason in row["missed"]]
    print_table(made, "model", "pixels", "layers", "N > 2d", "plan", "attention, GMACs", "ms", "ratio")
    for line in left:
        print(line)
