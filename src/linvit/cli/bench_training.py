"""`linvit bench training`: images per second of a whole training, loader included."""

from __future__ import annotations

from typing import Annotated

import typer

from linvit.cli.arguments import Device, Loader, ModelArg, Root, Settings, Workers, find_device, pairs
from linvit.cli.bench import Output, Resume, default_path, finish
from linvit.cli.output import Json, progress


def training(
    model: Annotated[str, typer.Argument(help="A timm model, such as vit_tiny_patch16_224.")],
    data: Annotated[str, typer.Option(help="As for `linvit train`; digits if not given.")] = "",
    plan: Annotated[str, typer.Option(help="Plans to convert by, with commas; stella if not given.")] = "",
    recipe: Annotated[str, typer.Option(help="Whose batches, augmentation, optimiser, losses and stages.")] = "deit",
    set_: Settings = None,
    steps: Annotated[int, typer.Option(help="Steps of each training; 200 if not given, 75 with --loaders.")] = 0,
    model_arg: ModelArg = None,
    root: Root = None,
    loader: Loader = "auto",
    loaders: Annotated[
        bool, typer.Option("--loaders", help="With each loader, and without. On JPEGs made for it without --data.")
    ] = False,
    workers: Workers = 4,
    device: Device = "auto",
    output: Output = None,
    resume: Resume = None,
    as_json: Json = False,
) -> None:
    """Train a model with softmax and converted, one after the other, and count images per second, loader included.

    Of a recipe in stages that is the longest one's; the seconds are those of all stages for all their epochs. With
    --loaders and no --plan, softmax alone is trained, by each loader.

    \b
    Example: linvit bench training vit_tiny_patch16_224 --model-arg img_size=128 --data photos.tar --plan stella
    Example: linvit bench training vit_tiny_patch16_224 --loaders --workers 14
    """
    import copy
    from itertools import product
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from linvit.cli.bench_output import print_training
    from linvit.conversion import convert
    from linvit.conversion.plan import parse_plan, split_plans
    from linvit.measurement import record
    from linvit.tasks.classify.data import open_data
    from linvit.tasks.classify.fitting import Sets
    from linvit.tasks.classify.public import name_of, start
    from linvit.tasks.classify.training_speed import STEP_ALONE, loaders_for, make_jpegs, training_speed
    from linvit.training.config import override
    from linvit.training.objectives.teacher import open_teacher
    from linvit.training.recipes import recipe as named_recipe

    place = find_device(device)
    config = override(named_recipe(recipe, name_of(model)), set_ or [])
    args = pairs(model_arg, "--model-arg")
    names = ["softmax", *split_plans(plan or ("softmax" if loaders else "stella"))]
    plans = {name: parse_plan(name) for name in names}  # a wrong name is told before anything is trained
    steps = steps or (75 if loaders else 200)
    head = {"kind": "bench training", "version": 1, "model": model, "args": args, "recipe": config.to_dict()}
    head |= {"data": data or ("JPEGs" if loaders else "digits"), "steps": steps}
    head |= {"workers": workers, "torchvision": record.package("torchvision")} if loaders else {}
    with TemporaryDirectory() as made:
        if loaders and not data:
            make_jpegs(Path(made))
        train, _ = open_data(data or (made if loaders else "digits"), root=root)
        path = resume or output or default_path(f"bench-training-{model}")
        environment = record.environment(place)
        file = record.ResultFile(path, head | {"images": len(train)}, environment, resume=resume is not None)
        done = {(row["attention"], row.get("loader", "")) for row in file.rows}
        sets = Sets(train, loader=loader, workers=workers, held={})
        sources = loaders_for(sets, place) if loaders else {"": sets}
        left = [pair for pair in product(plans, sources) if pair not in done]
        with progress(f"training {model}", len(left)) as advance:
            for name, source in left:
                built = start(model, False, dict(args), train.class_count, config.seed)
                teacher = None
                if config.needs_teacher:
                    teacher = open_teacher(config.teacher) if config.teacher else copy.deepcopy(built)
                if name != "softmax" or config.stages:  # stages align layers of ours, so softmax's have to be ours too
                    convert(built, plans[name])
                given, loading = sources[source], source != STEP_ALONE
                row = training_speed(built, given, config, steps=steps, device=device, teacher=teacher, loading=loading)
                file.add({"attention": name, **({"loader": source} if source else {}), **row})
                advance()
    finish(file.finish(), print_training, as_json)
