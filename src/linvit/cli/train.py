"""`linvit train`: train, fine-tune or distil a model."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linvit.cli.arguments import Loader, ModelArg, Root, Settings, Workers, pairs, square_size
from linvit.cli.convert import dropping
from linvit.cli.output import INTERRUPTED, Json, console, print_json, progress, table
from linvit.cli.train_output import first_process, screen

if TYPE_CHECKING:
    from linvit.tasks import Trained


def train(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_DIR", help="A timm model, or a folder linvit saved.")],
    data: Annotated[str, typer.Option(help="digits, an image folder, a .tar of one, or a set timm knows by name.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="RUN_DIR", help="Where the run is kept.")],
    recipe: Annotated[
        str, typer.Option(help="mixa, castling, qtvit, mobile, fair, deit, finetune, distil or fast.")
    ] = "fast",
    plan: Annotated[str, typer.Option(help="Convert first, by a plan, a mechanism or a plan's JSON file.")] = "",
    option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of the plan.")] = None,
    drop: Annotated[str, typer.Option(help="What conversion may give up, with commas.")] = "",
    teacher: Annotated[
        str, typer.Option(metavar="MODEL_OR_DIR", help="Whom to learn from; the unconverted model unless told.")
    ] = "",
    size: Annotated[str, typer.Option(help="Image size, such as 384; the model's own unless told.")] = "",
    set_: Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in RUN_DIR.")] = False,
    pretrained: Annotated[bool, typer.Option(help="Start from timm's weights.")] = True,
    model_arg: ModelArg = None,
    root: Root = None,
    loader: Loader = "auto",
    workers: Workers = 4,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """Train a model by a recipe; with --plan, convert it first and learn from the original.

    A folder that is converted already learns from the model it was made from. Images without class folders are learnt
    from the teacher alone. RUN_DIR gets log.jsonl, checkpoints and, in the end, the models `last` and `best`. A killed
    run goes on with --resume. Start it with `torchrun --nproc_per_node 8 -m linvit train` to use several GPUs.

    \b
    Example: linvit train deit_tiny_patch16_224 --data imagenet --plan mixa --recipe fast -o runs/mixa
    """
    from linvit import tasks
    from linvit.training.processes import close_process_group

    try:
        with screen(notes_only=as_json) as watch, dropping(drop) as given_up:
            found = tasks.train(
                model,
                data,
                recipe,
                plan=plan or None,
                options=pairs(option, "--option"),
                drop=given_up,
                teacher=teacher or None,
                output=output,
                size=square_size(size),
                settings=set_ or [],
                resume=resume,
                pretrained=pretrained,
                model_args=pairs(model_arg, "--model-arg"),
                root=root,
                loader=loader,
                workers=workers,
                device=device,
                watch=watch,
                progress=progress,
            )
    except KeyboardInterrupt:
        typer.echo(f"stopped: the same command with --resume goes on with {output}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    close_process_group()
    if not first_process():
        return
    if as_json:
        print_json(summary(found, output))
    else:
        print_outcome(found, output)


def summary(found: Trained, folder: Path) -> dict[str, Any]:
    conversion = None if found.report is None else str(found.report).splitlines()[0]
    values = {
        field.name: getattr(found, field.name) for field in fields(found) if field.name not in ("model", "report")
    }
    return {"run": str(folder), "conversion": conversion, **values}


def print_outcome(outcome: Trained, folder: Path) -> None:
    labelled = "agreement" not in outcome.last
    columns = {"top1": "top-1", "top5": "top-5"} if labelled else {"agreement": "agreement", "kl": "KL"}
    made = table(weights=8, **dict.fromkeys(columns.values(), -9), step=-6)
    for name, metrics in (("last", {**outcome.last, "step": outcome.steps}), ("best", outcome.best)):
        if metrics.keys() & columns.keys():
            shown = [f"{metrics[key]:.4f}" if key == "kl" else f"{metrics[key]:.2f}" for key in columns]
            made.add_row(name, *shown, f"{metrics['step']:.0f}")
    out = console()
    out.print(made)
    speed = f", {outcome.images_per_second:,.0f} images/s" if outcome.images_per_second else ""
    out.print(f"{outcome.steps} steps, {outcome.seconds:.0f} s{speed}. Models: {folder / 'best'}, {folder / 'last'}")
