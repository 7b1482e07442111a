"""`linvit bench op | model | training | scaling`: speed and memory, side by side in one run; `edge` is beside this."""

import copy
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linvit.cli import arguments
from linvit.cli.output import Json, print_json, tracked
from linvit.errors import LinvitError

if TYPE_CHECKING:
    import torch

    from linvit.measurement.record import ResultFile

app = typer.Typer(
    no_args_is_help=True,
    help="""Measure speed and memory against softmax, in one run.

    \b
    Example: linvit bench model deit_tiny_patch16_224 --plan stella --size 224,448 --batch 8""",
)

USUAL = {"cuda": "bf16", "cpu": "fp32"}  # the precision on each device
Precision = Annotated[
    str | None, typer.Option(help="bf16, fp16 or fp32; bf16 on a GPU and fp32 on the CPU if not given.")
]
Output = Annotated[Path | None, arguments.output("FILE", "The result file; else a name with the time.")]
Resume = Annotated[Path | None, typer.Option(help="Go on with this unfinished result file.")]
Source = Annotated[Path | None, typer.Option("--from", help="Show this result file and measure nothing.")]
Budget = Annotated[float, typer.Option(help="Seconds to spend on each time.")]


@app.command("op", short_help="A mechanism beside PyTorch's attention.")
def op(
    mechanism: Annotated[str, typer.Option("--mechanism", "-m", help="One that `linvit list` names.")] = "stella",
    option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="An option of the mechanism.")] = None,
    preset: Annotated[str | None, typer.Option(help="deit, grid, cpu or kernels: shapes to choose at once.")] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1",
    heads: Annotated[str, typer.Option(help="Numbers of heads.")] = "6",
    head_dim: Annotated[str, typer.Option(help="Channels per head.")] = "64",
    tokens: Annotated[str, typer.Option(help="Numbers of tokens.")] = "196,784",
    bias: Annotated[bool, typer.Option("--bias", help="With a learned bias that images share, as in Swin.")] = False,
    passes: Annotated[str, typer.Option(help="forward, forward+backward, or both.")] = "forward,forward+backward",
    compared: Annotated[str, typer.Option(help="What to measure; all unless told.")] = "ours,sdpa,reference,compiled",
    precision: Precision = None,
    device: arguments.Device = "auto",
    budget: Budget = 0.2,
    output: Output = None,
    resume: Resume = None,
    source: Source = None,
    plot: arguments.Picture = None,
    as_json: Json = False,
) -> None:
    """One mechanism beside SDPA, its reference, the compiled reference and the memory floor.

    Each is checked against float64 first; where the check is red no speed is printed and the exit code is 1.

    \b
    Example: linvit bench op --mechanism stella --batch 64 --heads 6 --tokens 196,784 --plot speed.png
    """
    from linvit import clock
    from linvit.cli.bench_output import print_op
    from linvit.figures import check_picture, plot_op
    from linvit.measurement import record, speed

    if plot is not None:
        check_picture(plot)
    if source is not None:
        result = record.read_result(source, "bench op")
    else:
        place = arguments.find_device(device)
        if preset is not None and preset not in speed.PRESETS:
            raise LinvitError(f"unknown preset '{preset}'; known: {', '.join(speed.PRESETS)}")
        asked = speed.shapes(*(arguments.numbers(text) for text in (batch, heads, head_dim, tokens)))
        over = [replace(shape, bias=bias) for shape in (speed.PRESETS[preset] if preset else asked)]
        settings: dict[str, Any] = {"mechanism": mechanism, "options": arguments.pairs(option, "--option")}
        settings["dtype"] = precision or USUAL[place.type]
        wanted, which = arguments.words(compared, speed.IMPLEMENTATIONS), arguments.words(passes, speed.PASSES)
        head = {"kind": "bench op", "version": 1, **settings, "layout": "packed"}
        file = open_result(output, resume, mechanism, head, place)
        file.data.setdefault("floor_elements", speed.ELEMENTS)
        file.data.setdefault("bandwidth", clock.copy_bandwidth(place))
        done = frozenset(speed.key(row) for row in file.rows)
        rows = speed.sweep(over=over, device=place, passes=which, compared=wanted, done=done, budget=budget, **settings)
        left = len(over) * len(which) * len(wanted) - len(done)
        result = file.fill(tracked(rows, f"timing {mechanism}", left))
    if plot is not None:
        plot_op(result, plot)
    finish(result, print_op, as_json)


@app.command("model", short_help="A model beside its converted self.")
def model(
    name: Annotated[
        str, typer.Argument(help="A timm model, such as deit_small_patch16_224 or faster_rcnn, or a saved detector.")
    ] = "",
    plan: Annotated[
        str,
        typer.Option(
            "--plan", metavar="PLAN", help="A plan or mechanism; of detectors and segmenters several, with commas."
        ),
    ] = "stella",
    option: arguments.PlanOptions = None,
    keep: arguments.Keep = None,
    drop: arguments.Drop = "",
    model_arg: arguments.ModelArg = None,
    size: arguments.Sizes = "",
    batch: Annotated[str, typer.Option(help="Batch size, 64 or to detect and segment 8, or one for each size.")] = "",
    passes: Annotated[str, typer.Option(help="inference, training, or both.")] = "inference,training",
    runtime: Annotated[str, typer.Option(help="eager, compiled, or graph: as a CUDA graph.")] = "eager,compiled",
    precision: Precision = None,
    device: arguments.Device = "auto",
    budget: Budget = 1.0,
    output: Output = None,
    resume: Resume = None,
    source: Source = None,
    as_json: Json = False,
) -> None:
    """A timm model with softmax attention beside its converted self: images per second and peak memory.

    A detector or segmenter, or a folder that holds one, is timed and counted part by part beside each plan; compiled,
    all but its head is.

    \b
    Example: linvit bench model deit_tiny_patch16_224 --plan stella --size 224,448 --batch 8
    Example: linvit bench model swin_tiny_patch4_window7_224 --plan stella --drop relative_bias,shift_mask
    Example: linvit bench model faster_rcnn --model-arg backbone=vit_tiny_patch16_224 --plan stella,relu_linear
    """
    from linvit.cli.bench_output import print_dense, print_model
    from linvit.conversion import convert, parse_plan
    from linvit.conversion.plan import split_plans
    from linvit.measurement import dense_speed, model_speed, record
    from linvit.models.dense import HEADS

    if source is not None:
        result = record.read_result(source)
        if result.get("kind") == dense_speed.KIND:
            finish(result, print_dense, as_json)
        else:
            finish(record.read_result(source, "bench model"), print_model, as_json)
        return
    if not name:
        raise LinvitError("give a timm model, such as deit_small_patch16_224, or --from FILE")
    dense = name in HEADS or Path(name).is_dir()
    place, batches = arguments.find_device(device), arguments.numbers(batch or ("8" if dense else "64"))
    sizes = [arguments.image_size(part) for part in (size or ("512" if dense else "224")).split(",")]
    if len(batches) == 1:
        batches *= len(sizes)
    if len(batches) != len(sizes):
        raise LinvitError(f"give one batch size, or {len(sizes)}: one for each size")
    options, args = arguments.plan_options(option, keep), arguments.pairs(model_arg, "--model-arg")
    plans = {text: parse_plan(text, **options) for text in (split_plans(plan) if dense else [plan])}
    which, how = arguments.words(passes, model_speed.PASSES), arguments.words(runtime, model_speed.MODES)
    settings: dict[str, Any] = {"dtype": precision or USUAL[place.type], **({"args": args} if args else {})}
    with arguments.dropping(drop) as given_up:
        told = options | ({"drop": given_up} if given_up else {})
        kind = dense_speed.KIND if dense else "bench model"
        swaps = {text: partial(convert, plan=chosen, drop=given_up, device=place) for text, chosen in plans.items()}
        models = dense_speed.make_models(name, args, swaps) if dense else {}
        head = {"kind": kind, "version": 1, "model": record.anywhere(name), "to": plan, "options": told, **settings}
        stem = "-".join([Path(name).name, *(chosen.name for chosen in plans.values())])
        file = open_result(output, resume, stem, head, place)
        grid: dict[str, Any] = {"sizes": sizes, "batches": batches, "passes": which, "modes": how, "budget": budget}
        grid |= {"device": place, "done": frozenset(model_speed.key(row) for row in file.rows)}
        if dense:
            rows = dense_speed.sweep(models, dtype=settings["dtype"], **grid)
        else:
            rows = model_speed.sweep(name, swaps[plan], **grid, **settings)
        left = (1 + len(plans)) * len(sizes) * len(which) * len(how) - len(file.rows)
        result = file.fill(tracked(rows, f"timing {name}", left))
    finish(result, print_dense if dense else print_model, as_json)


@app.command("training", short_help="Training, with softmax and converted.")
def training(
    model: Annotated[str, typer.Argument(help="A timm model, such as vit_tiny_patch16_224.")] = "",
    data: arguments.Data = "",
    plan: arguments.PlanTexts = "",
    recipe: arguments.Recipe = "deit",
    set_: arguments.Settings = None,
    steps: Annotated[int, typer.Option(help="Steps of each training; 200 if not given, 75 with --loaders.")] = 0,
    model_arg: arguments.ModelArg = None,
    root: arguments.Root = None,
    loader: arguments.Loader = "auto",
    loaders: Annotated[
        bool, typer.Option("--loaders", help="With each loader, and without. On JPEGs made for it without --data.")
    ] = False,
    workers: arguments.Workers = 4,
    device: arguments.Device = "auto",
    output: Output = None,
    resume: Resume = None,
    source: Source = None,
    as_json: Json = False,
) -> None:
    """Train a model with softmax and converted (stella, unless --plan says otherwise), one after the other, and count
    images per second, loader included.

    Of a recipe in stages that is the longest one's; the seconds are those of all stages for all their epochs. Without
    --data on scikit-learn's digits. With --loaders and no --plan, softmax alone is trained, by each loader.

    \b
    Example: linvit bench training vit_tiny_patch16_224 --model-arg img_size=128 --data photos.tar --plan stella
    Example: linvit bench training vit_tiny_patch16_224 --loaders --workers 14
    """
    from linvit.cli.bench_output import print_training
    from linvit.conversion import convert, parse_plan
    from linvit.conversion.plan import split_plans
    from linvit.measurement.record import package, read_result
    from linvit.tasks.classify.data import open_data
    from linvit.tasks.classify.fitting import Sets
    from linvit.tasks.classify.training_speed import STEP_ALONE, loaders_for, make_jpegs, training_speed
    from linvit.tasks.kinds import name_of, start_model
    from linvit.training import override
    from linvit.training import recipe as named_recipe
    from linvit.training.objectives.teacher import open_teacher

    if source is not None:
        finish(read_result(source, "bench training"), print_training, as_json)
        return
    if not model:
        raise LinvitError("give a timm model, such as vit_tiny_patch16_224, or --from FILE")
    place = arguments.find_device(device)
    config = override(named_recipe(recipe, name_of(model)), set_ or [])
    args = arguments.pairs(model_arg, "--model-arg")
    names = ("softmax", *split_plans(plan or ("softmax" if loaders else "stella")))
    plans = {name: parse_plan(name) for name in dict.fromkeys(names)}  # a wrong name is told before anything is trained
    steps = steps or (75 if loaders else 200)
    head = {"kind": "bench training", "version": 1, "model": model, "args": args, "recipe": config.to_dict()}
    head |= {"data": data or ("JPEGs" if loaders else "digits"), "steps": steps}
    head |= {"workers": workers, "torchvision": package("torchvision")} if loaders else {}
    with TemporaryDirectory() as made:
        if loaders and not data:
            make_jpegs(Path(made))
        images, _ = open_data(data or (made if loaders else "digits"), root=root)
        file = open_result(output, resume, model, head | {"images": len(images)}, place)
        done = {(row["attention"], row.get("loader", "")) for row in file.rows}
        sets = Sets(images, loader=loader, workers=workers, held={})
        sources = loaders_for(sets, place) if loaders else {"": sets}

        classes = {} if images.class_count is None else {"num_classes": images.class_count}

        def measure(pair: tuple[str, str]) -> dict[str, Any]:
            name, kind = pair
            built = start_model(model, config.seed, pretrained=False, args={**classes, **args})
            teacher = None
            if config.needs_teacher:
                teacher = open_teacher(config.teacher) if config.teacher else copy.deepcopy(built)
            if name != "softmax" or config.stages:  # stages align layers of ours, so softmax's have to be ours too
                convert(built, plans[name])
            given, loading = sources[kind], kind != STEP_ALONE
            row = training_speed(built, given, config, steps=steps, device=device, teacher=teacher, loading=loading)
            return {"attention": name, **({"loader": kind} if kind else {}), **row}

        left = [pair for pair in product(plans, sources) if pair not in done]
        finish(file.fill(tracked(map(measure, left), f"training {model}", len(left))), print_training, as_json)


@app.command("scaling", short_help="Whether linear mechanisms are linear.")
def scaling(
    mechanism: Annotated[list[str] | None, typer.Option("--mechanism", "-m", help="Only these, of the linear.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="N; the other size is twice that.")] = 4096,
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
    measured = (measurement.scaling(name, variant, tokens) for name, variant in found)
    results = list(tracked(measured, "doubling the tokens", len(found)))
    if as_json:
        print_json(results)
    else:
        print_scaling(results)
    if not all(result["linear"] for result in results):
        raise typer.Exit(1)


def finish(result: dict[str, Any], print_result: Callable[[dict[str, Any]], None], as_json: bool) -> None:
    """Print a result; what was measured to be wrong makes the exit code 1."""
    if as_json:
        print_json(result)
    else:
        print_result(result)
    if any(row["status"] == "wrong" for row in result["rows"]):
        raise typer.Exit(1)


def open_result(
    output: Path | None, resume: Path | None, what: str, head: dict[str, Any], place: "torch.device"
) -> "ResultFile":
    """The result file that --output or --resume names, or one with the time in its name."""
    from linvit.measurement.record import ResultFile, environment

    stem = f"{head['kind'].replace(' ', '-')}-{what}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    return ResultFile(resume or output or Path(f"{stem}.json"), head, environment(place), resume=resume is not None)
