"""`linvit eval`: what a classifier gets right."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linvit.cli import arguments
from linvit.cli.output import Json, console, print_json, progress, table
from linvit.cli.train import first_process, print_note

if TYPE_CHECKING:
    from linvit.tasks.classify.metrics import Evaluation


def eval_(
    model: Annotated[str, typer.Argument(metavar="DIR_OR_MODEL", help="A folder linvit saved, or a timm model.")],
    data: arguments.Data,
    teacher: arguments.Teacher = "",
    size: arguments.Size = "",
    split: Annotated[str, typer.Option(help="train or validation (unless told); without splits also all.")] = "",
    per_class: Annotated[bool, typer.Option("--per-class", help="Print every class.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="A JSON file of each image's choice.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 256,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    pretrained: arguments.Pretrained = True,
    model_arg: arguments.ModelArg = None,
    root: arguments.Root = None,
    loader: arguments.Loader = "auto",
    workers: arguments.Workers = 4,
    device: arguments.Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure a classifier: top-1 with its standard error, top-5, each class, and agreement with a teacher.

    Of a set without splits what the model's training held out is measured, or all if nobody trained on it.

    \b
    Example: linvit eval runs/mixa/best --data imagenet --teacher deit_tiny_patch16_224
    """
    from linvit.tasks import evaluate

    arguments.check_file(output)
    built = {"pretrained": pretrained, "model_args": arguments.pairs(model_arg, "--model-arg")}
    built |= {"teacher": teacher or None, "size": arguments.square_size(size), "batch": batch, "precision": precision}
    where = {"split": split, "root": root, "loader": loader, "workers": workers, "device": device}
    options: dict[str, Any] = {**built, **where, "watch": print_note, "progress": progress}
    found = evaluate(model, data, **options)
    if not first_process():
        return
    if as_json:
        numbers = {**found.metrics(), **({"per_class": found.per_class} if found.labelled else {})}
        print_json({"model": model, "data": data, "split": split or "auto", "images": len(found.labels), **numbers})
    else:
        print_evaluation(found, per_class)
    if output is not None:
        found.save(output)


def print_evaluation(found: "Evaluation", per_class: bool) -> None:
    out, images = console(), f"{len(found.labels):,} images"
    if not found.labelled:
        agreed = f"[bold]{found.agreement:.2f} %[/bold] of {images}"
        out.print(f"no labels; agrees with the teacher on {agreed}, KL {found.kl:.4f}")
        return
    out.print(f"top-1 [bold]{found.top1:.2f} %[/bold] ± {found.standard_error:.2f} on {images}")
    out.print(f"top-5 {found.top5:.2f} %")
    if found.agreement is not None and found.kl is not None:
        out.print(f"agrees with the teacher on {found.agreement:.2f} %, KL {found.kl:.4f}")
    rates = found.per_class
    if per_class:
        out.print(table(((name, f"{rate:.2f}") for name, rate in rates.items()), **{"class": 24, "top-1": -7}))
    else:
        worst = min(rates, key=lambda name: rates[name])
        out.print(f"worst class {worst}: {rates[worst]:.2f} % (--per-class prints all {len(rates)})")
