"""`linvit export`: a model as a file for another runtime, verified on photographs before it is called done."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linvit.cli import arguments
from linvit.cli.metrics import shown_metrics
from linvit.cli.output import Json, console, print_json, progress, styled, table
from linvit.cli.train import print_note
from linvit.errors import LinvitError

if TYPE_CHECKING:
    from linvit.runtimes import Exported
    from linvit.runtimes.target import Target


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL_OR_DIR", help=arguments.MODEL)],
    to: Annotated[str, typer.Option(help="onnx, openvino, coreml or executorch.")],
    output: Annotated[Path | None, arguments.output("FILE", "The file; else model.… in the folder.")] = None,
    size: Annotated[
        str, typer.Option(metavar="H,W", help="Height and width in pixels, as 384,512; the model's own unless told.")
    ] = "",
    dynamic: Annotated[bool, typer.Option("--dynamic", help="A file for any size and batch.")] = False,
    precision: Annotated[str, typer.Option(help="fp32, fp16 or int8.")] = "fp32",
    data: arguments.Data = "",
    calibrate: Annotated[Path | None, typer.Option(metavar="DIR", help="Images that int8 is calibrated on.")] = None,
    photographs: Annotated[int, typer.Option(min=1, help="Photographs to verify the file on.")] = 8,
    pretrained: arguments.Pretrained = True,
    model_arg: arguments.ModelArg = None,
    root: arguments.Root = None,
    as_json: Json = False,
) -> None:
    """Write a model for another runtime, and verify the written file in another process: its outputs for real
    photographs against PyTorch's and, with --data, its metric too.

    Beside the file goes a JSON file with preprocessing, labels and what was verified. A file that departs from the
    model is not kept, and the error names the first layer that does. What needs more packages says which to install.

    \b
    Example: linvit export deit_s_mixa --to onnx
    Example: linvit export deit_s_mixa --to openvino --precision int8 --calibrate photos/train --data photos
    """
    from linvit.conversion import open_model
    from linvit.conversion.convert import own_size
    from linvit.models.dense import DenseModel
    from linvit.runtimes import export as write
    from linvit.runtimes.exporting import find_target
    from linvit.tasks import evaluate
    from linvit.tasks.classify.checks import outputs_of
    from linvit.tasks.dense.fitting import trained_settings

    kind = find_target(to)
    kind.check(precision, dynamic)
    pixels = arguments.image_size(size.replace(",", "x")) if size else None
    built = open_model(model, pretrained=pretrained, args=arguments.pairs(model_arg, "--model-arg"))
    dense = isinstance(built, DenseModel)
    if data and isinstance(built, DenseModel):
        height, width = pixels or own_size(built)
        if trained_settings(built).resize != "square" or height != width:
            raise LinvitError("--data measures segmenters on images brought to a square, without padding: leave it out")
    elif data:
        outputs_of(built)  # what has no classifier cannot be measured
    saved = Path(model).is_dir()
    place = output or (Path(model) / f"model{kind.suffix}" if saved else Path(f"{Path(model).name}{kind.suffix}"))
    done = write(
        built,
        to,
        place,
        size=pixels,
        dynamic=dynamic,
        precision=precision,
        calibrate=calibrate,
        images=data if data and Path(data).is_dir() and not dense else None,  # beside annotated ones lie masks
        measure=(lambda one: evaluate(one, data, root=root, device="cpu", watch=print_note).metrics())
        if data
        else None,
        count=photographs,
        progress=progress,
    )
    if as_json:
        print_json(done.to_dict())
    else:
        print_exported(done, kind)


def print_exported(done: "Exported", kind: "Target") -> None:
    out, facts = console(), done.facts
    what = f"{kind.title} in {done.precision}, {'any size' if done.dynamic else '{}×{} pixels'.format(*done.size)}"
    out.print(styled(f"{what}: ", (done.path, "bold"), f", {done.bytes / 2**20:.1f} MiB"))
    if done.checks:
        rows = []
        for check in done.checks:
            agreed = "" if check.agreement is None else f"{check.agreement:.0%}"
            rows.append(
                ("×".join(map(str, check.size)), check.images, f"{check.largest:.1e}", f"{check.relative:.1e}", agreed)
            )
        out.print(
            table(
                rows,
                **{"pixels": 9, "photographs": -11, "largest error": -13, "relative (RMS)": -14, "top-1 agrees": -12},
            )
        )
    else:
        told = f"{facts['operations']} operations, all of {facts['float32_sums']} sums over tokens in float32"
        out.print(f"{kind.title} runs on Apple's systems only: checked by its structure ({told}), not by its outputs.")
    if "delegated" in facts:
        left = ", ".join(f"{count} {name}" for name, count in facts["left"].items())
        out.print(f"XNNPACK takes {facts['delegated']:.0%} of {facts['nodes']} nodes; the others: {left}.")
    if done.precision != "fp32" and "float32_nodes" in facts:
        out.print(f"{facts['float32_nodes']} operations that add up over tokens stay in float32.")
    if done.precision == "int8" and not done.metrics:
        out.print("What eight bits cost in accuracy was not measured: give --data.")
    if done.metrics:
        before, after = (shown_metrics(done.metrics[when]) for when in ("before", "after"))
        out.print(table(((name, before[name], after[name]) for name in before), **{"": 8, "PyTorch": -9, "file": -9}))
    out.print(f"Preprocessing, labels and this check are in {done.path.name}.json.", style="italic")
