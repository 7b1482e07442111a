"""`linvit eval`: what a classifier gets right."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linvit.cli.arguments import Loader, ModelArg, Root, Workers, pairs, square_size
from linvit.cli.output import Json, console, print_json, progress, table
from linvit.cli.train_output import first_process, print_note
from linvit.errors import LinvitError

if TYPE_CHECKING:
    from linvit.tasks.classify.metrics import Evaluation


def eval_(
    model: Annotated[str, typer.Argument(metavar="DIR_OR_MODEL", help="A folder linvit saved, or a timm model.")],
    data: Annotated[str, typer.Option(help="digits, an image folder, a .tar of one, or a set timm knows by name.")],
    teacher: Annotated[
        str, typer.Option(metavar="MODEL_OR_DIR", help="Also say how often the model agrees with this one.")
    ] = "",
    size: Annotated[str, typer.Option(help="Image size, such as 384; the model's own unless told.")] = "",
    split: Annotated[
        str,
        typer.Option(
            help="train or validation; of a set without splits also all. Else validation, or what training held out."
        ),
    ] = "",
    per_class: Annotated[bool, typer.Option("--per-class", help="Print every class.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Save each image's label and choice as JSON.")
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 256,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    pretrained: Annotated[bool, typer.Option(help="Fetch timm's weights.")] = True,
    model_arg: ModelArg = None,
    root: Root = None,
    loader: Loader = "auto",
    workers: Workers = 4,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    as_json: Json = False,
) -> None:
    """Measure a classifier: top-1 with its standard error, top-5, each class, and agreement with a teacher.

    \b
    Example: linvit eval runs/mixa/best --data imagenet --teacher deit_tiny_patch16_224
    """
    from linvit import tasks

    if output is not None and not output.parent.is_dir():
        raise LinvitError(f"no folder {output.parent} to put {output.name} in; make it first")
    if output is not None and output.is_dir():
        raise LinvitError(f"{output} is a folder: give a file")
    found = tasks.evaluate(
        model,
        data,
        teacher=teacher or None,
        size=square_size(size),
        split=split,
        batch=batch,
        precision=precision,
        pretrained=pretrained,
        model_args=pairs(model_arg, "--model-arg"),
        root=root,
        loader=loader,
        workers=workers,
        device=device,
        watch=print_note,
        progress=progress,
    )
    if not first_process():
        return
    if as_json:
        numbers = {**found.metrics(), **({"per_class": found.per_class} if found.labelled else {})}
        print_json({"model": model, "data": data, "split": split or "auto", "images": len(found.labels), **numbers})
    else:
        print_evaluation(found, per_class)
    if output is not None:
        found.save(output)


def print_evaluation(found: Evaluation, per_class: bool) -> None:
    out = console()
    if not found.labelled:
        agreed = f"[bold]{found.agreement:.2f} %[/bold] of {len(found.labels):,} images"
        out.print(f"no labels; agrees with the teacher on {agreed}, KL {found.kl:.4f}")
        return
    out.print(f"top-1 [bold]{found.top1:.2f} %[/bold] ± {found.standard_error:.2f} on {len(found.labels):,} images")
    out.print(f"top-5 {found.top5:.2f} %")
    if found.agreement is not None and found.kl is not None:
        out.print(f"agrees with the teacher on {found.agreement:.2f} %, KL {found.kl:.4f}")
    rates = found.per_class
    if per_class:
        made = table(**{"class": 24, "top-1": -7})
        for name, rate in rates.items():
            made.add_row(name, f"{rate:.2f}")
        out.print(made)
    else:
        worst = min(rates, key=lambda name: rates[name])
        out.print(f"worst class {worst}: {rates[worst]:.2f} % (--per-class prints all {len(rates)})")
