"""`linvit bench training`: images per second of a whole training, loader included."""

from __future__ import annotations

from typing import Annotated

import typer

from linvit.cli.arguments import Loader, ModelArg, Root, Settings, Workers, pairs
from linvit.cli.bench import Device, Output, Resume, default_path, find_device
from linvit.cli.output import Json, print_json, progress


def training(
    model: Annotated[str, typer.Argument(help="A timm model, such as vit_tiny_patch16_224.")],
    data: Annotated[str, typer.Option(help="As for `linvit train`.")] = "digits",
    plan: Annotated[str, typer.Option(help="Plans to convert by, with commas, beside softmax.")] = "stella",
    recipe: Annotated[str, typer.Option(help="Whose batches, augmentation, optimiser, losses and stages.")] = "deit",
    set_: Settings = None,
    steps: Annotated[int, typer.Option(help="Steps of each training.")] = 200,
    model_arg: ModelArg = None,
    root: Root = None,
    loader: Loader = "auto",
    workers: Workers = 4,
    device: Device = "auto",
    output: Output = None,
    resume: Resume = None,
    as_json: Json = False,
) -> None:
    """Train a model with softmax and converted, one after the other, and count images per second, loader included.

    Of a recipe in stages that is the longest one's; the seconds are those of all stages for all their epochs.

    \b
    Example: linvit bench training vit_tiny_patch16_224 --model-arg img_size=128 --data photos.tar --plan stella
    """
    import copy

    import linvit
    from linvit.conversion.plan import parse_plan, split_plans
    from linvit.measurement import record
    from linvit.tasks.classify.data import open_data
    from linvit.tasks.classify.fitting import Sets
    from linvit.tasks.classify.public import name_of, start
    from linvit.tasks.classify.training_speed import training_speed
    from linvit.training.config import override
    from linvit.training.objectives.teacher import open_teacher
    from linvit.training.recipes import recipe as named_recipe

    place = find_device(device)
    config = override(named_recipe(recipe, name_of(model)), set_ or [])
    args = pairs(model_arg, "--model-arg")
    train, _ = open_data(data, root=root)
    names = ["softmax", *(name for name in split_plans(plan) if name != "softmax")]
    plans = {name: parse_plan(name) for name in names}  # a wrong name is told before anything is trained
    head = {"kind": "bench training", "version": 1, "model": model, "args": args, "data": data, "steps": steps}
    head |= {"recipe": config.to_dict(), "images": len(train)}
    path = resume or output or default_path(f"bench-training-{model}")
    file = record.ResultFile(path, head, record.environment(place), resume=resume is not None)
    done = {row["attention"] for row in file.rows}
    left = {name: one for name, one in plans.items() if name not in done}
    sets = Sets(train, loader=loader, workers=workers, held={})
    with progress(f"training {model}", len(left)) as advance:
        for name, one in left.items():
            built = start(model, False, dict(args), train.class_count, config.seed)
            teacher = None
            if config.needs_teacher:
                teacher = open_teacher(config.teacher) if config.teacher else copy.deepcopy(built)
            if name != "softmax" or config.stages:  # stages align layers of ours, so softmax's have to be ours too
                linvit.convert(built, one)
            row = training_speed(built, sets, config, steps=steps, device=device, teacher=teacher)
            file.add({"attention": name, **row})
            advance()
    result = file.finish()
    if as_json:
        print_json(result)
    else:
        from linvit.cli.bench_output import print_training

        print_training(result)
    if any(row["status"] == "wrong" for row in result["rows"]):
        raise typer.Exit(1)
