"""`linvit train`: train, fine-tune or distil a model, with a bar at a terminal or a line now and then in a file."""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linvit.cli import arguments
from linvit.cli.metrics import shown_metrics
from linvit.cli.output import INTERRUPTED, Json, console, print_json, progress, say, screen, styled, table

if TYPE_CHECKING:
    from rich.progress import Progress

    from linvit.tasks import Trained

PATIENCE = 10.0  # seconds between two lines where there is no terminal
Watch = Callable[[dict[str, Any]], None]


def train(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_DIR", help=arguments.MODEL)],
    data: arguments.Data,
    output: Annotated[Path, arguments.output("RUN_DIR", "Where the run is kept.")],
    recipe: arguments.Recipe = "fast",
    task: arguments.Task = "",
    head: arguments.Head = "",
    pyramid: arguments.Pyramid = "",
    plan: arguments.PlanText = "",
    option: arguments.PlanOptions = None,
    keep: arguments.Keep = None,
    drop: arguments.Drop = "",
    teacher: arguments.Teacher = "",
    size: arguments.Size = "",
    set_: arguments.Settings = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in RUN_DIR.")] = False,
    pretrained: arguments.Pretrained = True,
    model_arg: arguments.ModelArg = None,
    root: arguments.Root = None,
    loader: arguments.Loader = "auto",
    workers: arguments.Workers = 4,
    device: arguments.Device = "auto",
    logger: Annotated[
        str, typer.Option(metavar="NAME", help="wandb, or a function of yours as module:function, hears the run too.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Train a model by a recipe; with --plan, convert it first and learn from the original.

    A folder that is converted already learns from the model it was made from. Images without class folders are learnt
    from the teacher alone. RUN_DIR gets log.jsonl, checkpoints and, in the end, the models `last` and `best`. A killed
    run goes on with --resume. Start it with `torchrun --nproc_per_node 8 -m linvit train` to use several GPUs.

    To detect or segment, a classifier becomes the trunk of a --head; a detector or segmenter is trained as it is. With
    --task features a model without its classifier learns to give the features of its original, from any images.

    \b
    Example: linvit train deit_tiny_patch16_224 --data imagenet --plan mixa --recipe fast -o runs/mixa
    Example: linvit train swin_tiny_patch4_window7_224 --head faster_rcnn --data VOC2012 --recipe finetune -o runs/voc
    Example: linvit train vit_small_patch14_dinov2 --task features --data photos --plan relu_linear -o runs/dino
    """
    from linvit.tasks import train as run
    from linvit.training import close_process_group

    built = {"pretrained": pretrained, "model_args": arguments.pairs(model_arg, "--model-arg")}
    built |= {"task": task, "head": head, "pyramid": pyramid}
    built |= {"plan": plan or None, "options": arguments.plan_options(option, keep), "teacher": teacher or None}
    where = {"root": root, "loader": loader, "workers": workers, "device": device, "progress": progress}
    how = {"size": arguments.square_size(size), "settings": set_ or [], "output": output, "resume": resume}
    options: dict[str, Any] = {**built, **where, **how, "logger": logger}
    try:
        quiet: Watch | None = print_note if as_json or not first_process() else None
        with screen(quiet, bar, plain) as watch, arguments.dropping(drop) as given_up:
            found = run(model, data, recipe, drop=given_up, watch=watch, **options)
    except KeyboardInterrupt as stopped:
        if first_process():
            say(after_stop(output), err=True)
        raise typer.Exit(128 + getattr(stopped, "number", INTERRUPTED - 128)) from None
    close_process_group()
    if first_process() and as_json:
        values = {name: value for name, value in vars(found).items() if name not in ("model", "report")}
        conversion = None if found.report is None else str(found.report).splitlines()[0]
        print_json({"run": str(output), "conversion": conversion, **values})
    elif first_process():
        print_outcome(found, output)


def print_outcome(outcome: "Trained", folder: Path) -> None:
    columns = shown_metrics(outcome.last)
    rows = []
    for name, metrics in (("last", {**outcome.last, "step": outcome.steps}), ("best", outcome.best)):
        if shown := shown_metrics(metrics):
            rows.append((name, *shown.values(), f"{metrics['step']:.0f}"))
    out = console()
    if rows:
        out.print(table(rows, weights=8, **dict.fromkeys(columns, -9), step=-6))
    speed = f", {outcome.images_per_second:,.0f} images/s" if outcome.images_per_second else ""
    steps = f"{outcome.steps} step{'' if outcome.steps == 1 else 's'}"
    say(f"{steps}, {outcome.seconds:.0f} s{speed}. Models: {folder / 'best'}, {folder / 'last'}")


def after_stop(folder: Path) -> str:
    """What a stopped run can go on with."""
    from linvit.training.checkpoints import resumes_after

    step = resumes_after(folder)
    if step is None:
        return f"stopped before the first checkpoint: the same command begins {folder} anew"
    return f"stopped: the same command with --resume goes on after step {step} ({folder})"


def first_process() -> bool:
    """Whether this is the one of the processes that `torchrun` started which talks to the user."""
    return os.environ.get("RANK", "0") == "0"


def print_note(record: dict[str, Any]) -> None:
    if record["kind"] == "note":
        say(record["text"], err=True)


def bar(shown: "Progress") -> Watch:
    task: Any = None
    found = ""

    def watch(record: dict[str, Any]) -> None:
        nonlocal task, found
        if record["kind"] == "note":
            shown.console.print(styled(record["text"]))
        elif record["kind"] == "eval":
            found = f"  {score(record)}"
        else:
            if task is None:
                task = shown.add_task("", total=record["steps"], completed=record["step"], text="")
            shown.update(task, completed=record["step"], description=record["stage"], text=words(record) + found)

    return watch


def plain() -> Watch:
    """Lines for a log file: every evaluation and note, and the training now and then."""
    last = 0.0

    def watch(record: dict[str, Any]) -> None:
        nonlocal last
        print_note(record)
        if record["kind"] == "eval":
            print(f"step {record['step']}: {score(record)}", file=sys.stderr, flush=True)
        elif record["kind"] in ("train", "step") and time.monotonic() - last > PATIENCE:
            last = time.monotonic()
            place = f"{record['stage']}, step {record['step']} of {record['steps']}"
            print(f"{place}: {words(record)}{left(record)}", file=sys.stderr, flush=True)

    return watch


def score(record: dict[str, Any]) -> str:
    """What an evaluation found, in few words."""
    if "agreement" in record:
        return f"agrees with the teacher on {record['agreement']:.2f} %, KL {record['kl']:.4f}"
    return "  ".join(f"{name} {value}" for name, value in shown_metrics(record).items() if name != "top-5")


def words(record: dict[str, Any]) -> str:
    """The loss and speed of a record, in few words."""
    accuracy = "".join(f"  {name} {100 * record[name]:.1f} %" for name in ("accuracy", "agreement") if name in record)
    speed = f"  {record['images_per_second']:,.0f} images/s" if record["images_per_second"] else ""
    return f"epoch {record['epoch']:.1f}/{record['epochs']:.3g}  loss {record['loss']:.4f}{accuracy}{speed}"


def left(record: dict[str, Any]) -> str:
    """The time that is left, as 0:12:30."""
    seconds = record["seconds_left"]
    return "" if seconds is None else f"  {timedelta(seconds=round(seconds))} left"
