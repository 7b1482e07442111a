"""`linvit eval`: what a classifier gets right, what a detector finds, which pixels a segmenter knows, what a backbone's
features are worth."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linvit.cli import arguments
from linvit.cli.metrics import percent, shown_metrics
from linvit.cli.output import Json, console, print_json, progress, say, styled, table
from linvit.cli.train import first_process, print_note
from linvit.errors import LinvitError

if TYPE_CHECKING:
    from linvit.tasks.classify.metrics import Evaluation
    from linvit.tasks.detect.metrics import DetectionMetrics
    from linvit.tasks.features.metrics import FeatureEvaluation
    from linvit.tasks.segment.metrics import SegmentationMetrics


def eval_(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_DIR", help=arguments.MODEL)],
    data: arguments.Data,
    task: arguments.Task = "",
    teacher: arguments.Teacher = "",
    size: arguments.Size = "",
    split: Annotated[str, typer.Option(help="train or validation (unless told); without splits also all.")] = "",
    per_class: Annotated[bool, typer.Option("--per-class", help="Print every class.")] = False,
    output: Annotated[Path | None, arguments.output("FILE", "A JSON file of each image's choice.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Images at a time; 256 to classify, 16 to detect or segment, 128 else.")
    ] = None,
    precision: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    pretrained: arguments.Pretrained = True,
    model_arg: arguments.ModelArg = None,
    root: arguments.Root = None,
    loader: arguments.Loader = "auto",
    workers: arguments.Workers = 4,
    device: arguments.Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure a classifier: top-1 with its standard error, top-5, each class, and agreement with a teacher. Of a
    detector, COCO's twelve numbers for boxes and masks; of a segmenter, mIoU, mAcc and pAcc. Of a backbone (--task
    features), with a teacher the cosines of patches and images and how often both have the same nearest neighbour; with
    labels kNN and a ridge probe.

    Of a set without splits what the model's training held out is measured, or all if nobody trained on it.

    \b
    Example: linvit eval runs/mixa/best --data imagenet --teacher deit_tiny_patch16_224
    Example: linvit eval runs/voc/best --data VOC2012 --per-class
    Example: linvit eval runs/dino/best --task features --data photos --teacher vit_small_patch14_dinov2
    """
    from linvit.tasks import evaluate
    from linvit.tasks.kinds import kind_of

    arguments.check_file(output)
    found: Any
    wanted = kind_of(model, task).task
    classifying = wanted == "classify"
    if output is not None and not classifying:
        raise LinvitError("--output is for each image's choice, which classifiers make: take --json here")
    built = {"pretrained": pretrained, "model_args": arguments.pairs(model_arg, "--model-arg")}
    built |= {
        "task": task,
        "teacher": teacher or None,
        "size": arguments.square_size(size),
        "batch": batch,
        "precision": precision,
    }
    where = {"split": split, "root": root, "loader": loader, "workers": workers, "device": device}
    options: dict[str, Any] = {**built, **where, "watch": print_note, "progress": progress}
    found = evaluate(model, data, **options)
    if not first_process():
        return
    if as_json:
        numbers: dict[str, Any] = {}
        if wanted in ("classify", "features"):
            numbers["images"] = len(found.labels) if classifying else found.images
        numbers |= found.metrics()
        if wanted != "features" and (not classifying or found.labelled):
            numbers["per_class"] = found.per_class
        print_json({"model": model, "data": data, "split": split or "auto", **numbers})
    elif classifying:
        print_evaluation(found, per_class)
    elif wanted == "features":
        print_features(found)
    else:
        print_dense(found, per_class)
    if output is not None:
        found.save(output)


def print_evaluation(found: "Evaluation", per_class: bool) -> None:
    out, images = console(), f"{len(found.labels):,} images"
    if not found.labelled:
        agreed = (f"{found.agreement:.2f} %", "bold")
        out.print(styled("no labels; agrees with the teacher on ", agreed, f" of {images}, KL {found.kl:.4f}"))
        return
    out.print(styled("top-1 ", (f"{found.top1:.2f} %", "bold"), f" ± {found.standard_error:.2f} on {images}"))
    out.print(f"top-5 {found.top5:.2f} %")
    if found.agreement is not None and found.kl is not None:
        out.print(f"agrees with the teacher on {found.agreement:.2f} %, KL {found.kl:.4f}")
    print_classes({name: f"{rate:.2f}" for name, rate in found.per_class.items()}, "top-1", per_class)


def print_features(found: "FeatureEvaluation") -> None:
    out, metrics = console(), found.metrics()
    shown, images = shown_metrics(metrics), f"{found.images:,} images"
    if "patch_cosine" in metrics:
        patch, whole = (shown[f"{part} cosine"] for part in ("patch", "class"))
        out.print(
            styled("cosine with the teacher: patch ", (patch, "bold"), ", class ", (whole, "bold"), f" on {images}")
        )
    if maps := [f"{value:.4f}" for name, value in metrics.items() if name.startswith("map")]:
        out.print(f"of the maps before, from the finest: {', '.join(maps)}")
    if "neighbours" in metrics:
        out.print(styled("the same nearest neighbour for ", (f"{shown['neighbours']} %", "bold")))
    for name in ("knn", "probe"):
        if name in metrics:
            beside = f"teacher_{name}"
            other = f", the teacher {metrics[beside]:.2f} %" if beside in metrics else ""
            title = "kNN" if name == "knn" else name
            out.print(styled(f"{title} ", (f"{metrics[name]:.2f} %", "bold"), f"{other} of {images}"))


def print_dense(found: "DetectionMetrics | SegmentationMetrics", per_class: bool) -> None:
    from linvit.tasks.detect.metrics import DetectionMetrics

    out = console()
    if isinstance(found, DetectionMetrics):
        kinds = {"boxes": found.boxes} | ({} if found.masks is None else {"masks": found.masks})
        rows = ([name, *(percent(numbers[name]) for numbers in kinds.values())] for name in found.boxes)
        out.print(table(rows, **{"%": 6}, **dict.fromkeys(kinds, -7)))
    else:
        for name, value in shown_metrics(found.metrics()).items():
            out.print(styled(f"{name} ", (f"{value} %", "bold")))
        if found.broken:
            out.print(f"NaN or infinite outputs for {found.broken:,} pixels, which count as wrong")
    rates = {name: percent(rate) for name, rate in found.per_class.items()}
    print_classes(rates, "AP" if isinstance(found, DetectionMetrics) else "IoU", per_class)


def print_classes(rates: dict[str, str], what: str, every: bool) -> None:
    """Each class, or the worst."""
    if every:
        console().print(table(rates.items(), **{"class": 24, what: -7}))
    elif rates:
        worst = min(rates, key=lambda name: float(rates[name]))
        say(f"worst class {worst}: {rates[worst]} % (--per-class prints all {len(rates)})")
