"""`linvit train`: train, fine-tune or distil a model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linvit.cli.arguments import Loader, ModelArg, Root, Settings, Workers, pairs
from linvit.cli.convert import dropping, read_plan
from linvit.cli.output import INTERRUPTED, Json, console, print_json, progress, table
from linvit.cli.train_output import screen
from linvit.errors import LinvitError

if TYPE_CHECKING:
    from torch import nn

    from linvit.training.engine import Outcome


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

    Images without class folders are learnt from the teacher alone. RUN_DIR gets log.jsonl, checkpoints and, in the
    end, the models `last` and `best`. A killed run goes on with --resume. Start it with `accelerate launch -m linvit
    train` to use several GPUs or machines.

    \b
    Example: linvit train deit_tiny_patch16_224 --data imagenet --plan mixa --recipe fast -o runs/mixa
    """
    import linvit
    from linvit.tasks.classify import open_data
    from linvit.tasks.classify.fitting import fit
    from linvit.training.config import override
    from linvit.training.processes import make_accelerator, part
    from linvit.training.recipes import recipe as named_recipe

    config = override(named_recipe(recipe, name_of(model)), set_ or [])
    args = pairs(model_arg, "--model-arg")
    chosen = read_plan(plan, None, "first", "", pairs(option, "--option")) if plan else None
    if not plan and (option or drop):
        raise LinvitError("--option and --drop are of a conversion: give --plan too, or leave them out")
    if output.is_file():
        raise LinvitError(f"{output} is a file: give a folder")
    accelerator = make_accelerator(config, device)
    sets = open_data(data, root=root, unlabelled=True)
    asked = any(setting.partition("=")[0].strip() == "distillation_weight" for setting in set_ or [])
    if not sets[0].labelled and config.needs_labels and config.distillation != "none" and not asked:
        config = override(config, ["distillation_weight=1"])
        if accelerator.is_main_process:
            print(f"{data} has no labels: the teacher's answers are all there is to learn", file=sys.stderr)
    if teacher and not config.needs_teacher:
        raise LinvitError(f"recipe {recipe} has no use for a teacher: set distillation=soft, or leave --teacher out")
    built = start(model, pretrained, args, sets[0].class_count, config.seed)
    guide = find_teacher(teacher or config.teacher or "", built, plan) if config.needs_teacher else None
    if guide is not None and pretrained and not (teacher or config.teacher or Path(model).is_dir()):
        check_learnt(built, model, data, plan)
    elif guide is not None and not (teacher or config.teacher or Path(model).is_dir()) and accelerator.is_main_process:
        print("the teacher, the original, has random weights: train it first, or give --teacher", file=sys.stderr)
    if resume and not (output / "checkpoints").exists() and accelerator.is_main_process:
        print(f"there is nothing to resume in {output}: begun anew", file=sys.stderr)
    report = None
    if chosen is not None:
        with dropping(drop) as given_up:
            report = linvit.convert(built, chosen, drop=given_up)
    identity = {"model": model, "args": args, "plan": plan, "option": option, "drop": drop, "teacher": teacher}
    try:
        with screen(accelerator.is_main_process and not as_json) as watch:
            outcome = fit(
                built,
                *sets,
                config,
                teacher=guide,
                folder=output,
                resume=resume,
                accelerator=accelerator,
                loader=loader,
                workers=workers,
                watch=watch,
                identity={**identity, "pretrained": pretrained},
                progress=progress,
            )
    except KeyboardInterrupt:
        typer.echo(f"stopped: the same command with --resume goes on with {output}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    part()
    if not accelerator.is_main_process:
        return
    if as_json:
        print_json(summary(outcome, output, None if report is None else str(report).splitlines()[0]))
    else:
        print_outcome(outcome, output)


def name_of(model: str) -> str:
    """The name that a recipe may go by: of a saved model its own, not its folder's."""
    from linvit.conversion.saving import read_config

    return read_config(Path(model)).model if Path(model).is_dir() else model


def start(model: str, pretrained: bool, args: dict[str, Any], classes: int | None, seed: int) -> nn.Module:
    """The model to train, with an output for each class; the seed draws the weights that are not given."""
    import torch

    from linvit.conversion.opening import open_model

    torch.manual_seed(seed)
    if not Path(model).is_dir() and classes is not None:
        args.setdefault("num_classes", classes)
    built = open_model(model, pretrained=pretrained, args=args)
    if not Path(model).is_dir():
        built.linvit_origin = {"name": model, "args": args}  # type: ignore[assignment]
    return built


def find_teacher(name: str, model: nn.Module, plan: str) -> nn.Module:
    """The named teacher, or the model itself before its conversion."""
    import copy

    from linvit.training.distillation import open_teacher

    if name:
        return open_teacher(name)
    if not plan:
        raise LinvitError("the recipe learns from a teacher: give --teacher, or --plan to learn from the original")
    return copy.deepcopy(model)


def check_learnt(original: Any, model: str, data: str, plan: str) -> None:
    """Whether a pretrained original has answers to learn from: for another number of classes its classifier is new."""
    known = (getattr(original, "pretrained_cfg", None) or {}).get("num_classes")
    if known is None or known == original.num_classes:
        return
    first = f"linvit train {model} --data {data} --recipe finetune -o runs/original"
    raise LinvitError(
        f"{model} has not learnt these {original.num_classes} classes and cannot teach them: train it first ({first}) "
        f"and convert that (linvit train runs/original/best --data {data} --plan {plan} …), or give --teacher"
    )


def summary(outcome: Outcome, folder: Path, conversion: str | None) -> dict[str, Any]:
    from dataclasses import asdict

    return {"run": str(folder), "conversion": conversion, **asdict(outcome)}


def print_outcome(outcome: Outcome, folder: Path) -> None:
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
    sys.stdout.flush()
