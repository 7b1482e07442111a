"""`linvit show`: pictures of what models do and of what was measured."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linvit.cli import arguments, show_models
from linvit.cli.output import Json, console, print_json, progress, say, table

if TYPE_CHECKING:
    from linvit.figures.kernels import Curve

app = typer.Typer(
    no_args_is_help=True,
    help="""Draw what attention does, and what was measured.

    \b
    Example: linvit show maps deit_small_patch16_224 photo.jpg --plan stella -o maps.png""",
)
app.command("maps", short_help="Attention maps on photographs.")(show_models.maps)
app.command("features", short_help="Patch features, as colours.")(show_models.features)


@app.command("masks", short_help="How Castling's masks empty.")
def masks(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The folder of a training run.")],
    output: Annotated[Path | None, arguments.output("FILE", "A picture; RUN_DIR/masks.png.")] = None,
    as_json: Json = False,
) -> None:
    """Plot how Castling's masks empty: the share of non-zeros over the steps, for each layer.

    \b
    Example: linvit show masks runs/castling -o masks.png
    """
    from linvit.figures import check_picture, plot_masks
    from linvit.figures.plots import mask_lines
    from linvit.training.logs import read_log

    path, records = output or run / "masks.png", read_log(run)
    check_picture(path)
    layers, steps, kept, scales = mask_lines(records)
    plot_masks(records, path)
    ends = {layer: {"first": kept[0][i], "last": kept[-1][i]} for i, layer in enumerate(layers)}
    if as_json:
        print_json({"plot": str(path), "steps": len(steps), "layers": ends, "scale": scales[-1][1]})
        return
    rows = ((layer, *(f"{100 * share:.2f} %" for share in shares.values())) for layer, shares in ends.items())
    out = console()
    out.print(table(rows, layer=24, first=-8, last=-8))
    out.print(f"Share of non-zeros over {len(steps)} steps; the branch ended with weight {scales[-1][1]:.2g}.")
    say(f"Plot: {path}")


@app.command("kernels", short_help="What mechanisms take for alike.")
def kernels(
    output: Annotated[Path, arguments.output("FILE", "The picture.")] = Path("kernels.png"),
    head_dim: Annotated[int, typer.Option(min=2, max=512, help="Width of a head.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the random pairs.")] = 0,
    as_json: Json = False,
) -> None:
    """Plot what mechanisms take for alike: their similarity over the angle of query and key, and over their product.

    Softmax, ReLU, Castling's angular kernel exact and linear, Taylor's series of first and second order, and QT. What
    they make of a photograph shows `linvit show maps --figure qtvit`, castling or mobile.

    \b
    Example: linvit show kernels -o kernels.png
    """
    from linvit.figures.kernels import over_angle, over_product, plot_kernels
    from linvit.figures.style import check_picture

    check_picture(output)
    angle, product = over_angle(head_dim, seed), over_product(head_dim, seed)
    plot_kernels(output, angle, product, head_dim)
    if as_json:
        found = {
            name: {curve.name: {"x": curve.x.tolist(), "mean": curve.mean.tolist()} for curve in curves}
            for name, curves in (("angle", angle), ("product", product))
        }
        print_json({"plot": str(output), "head_dim": head_dim, "seed": seed, **found})
        return
    for curves, where in ((angle, (0, 45, 90, 135, 180)), (product, (-2, -1, 0, 1, 2))):
        rows = ((curve.name, *(f"{float(value_at(curve, x)):.3f}" for x in where)) for curve in curves)
        unit = "°" if curves is angle else ""
        console().print(table(rows, **{"similarity": 34}, **{f"{x}{unit}": -7 for x in where}))
    say(f"Plot: {output}")


def value_at(curve: "Curve", x: float) -> float:
    import numpy as np

    return float(np.interp(x, curve.x, curve.mean))


@app.command("sensitivity", short_help="Which layers a model can least do without.")
def sensitivity(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A timm model, or a folder that linvit saved.")],
    data: Annotated[Path, typer.Argument(metavar="DIR", help="Images without labels.")],
    plan: Annotated[str, typer.Option(metavar="MECHANISM", help="What layers become, one at a time.")] = "stella",
    keep: Annotated[int, typer.Option(min=0, help="So many layers are chosen to stay quadratic.")] = 0,
    images: Annotated[int, typer.Option(min=1, help="So many of them.")] = 64,
    output: Annotated[Path, arguments.output("FILE", "The picture.")] = Path("sensitivity.png"),
    drop: arguments.Drop = "",
    size: arguments.Size = "",
    checkpoint: Annotated[Path | None, typer.Option(metavar="FILE", help="Weights to use instead of timm's.")] = None,
    pretrained: arguments.Pretrained = True,
    model_arg: arguments.ModelArg = None,
    device: arguments.Device = "auto",
    as_json: Json = False,
) -> None:
    """Measure and plot which layers a model can least do without: how far its outputs turn when only one is converted.

    \b
    Example: linvit show sensitivity deit_tiny_patch16_224 photos --keep 4 -o sensitivity.png
    """
    from dataclasses import asdict

    from linvit.cli.convert import print_sensitivity
    from linvit.conversion import find_hosts, measure_sensitivity, open_model, resample
    from linvit.conversion.calibration import calibration_images
    from linvit.conversion.sensitivity import passes
    from linvit.figures import check_picture, plot_sensitivity

    check_picture(output)
    place, pixels = arguments.find_device(device), arguments.image_size(size) if size else None
    args, instead = arguments.pairs(model_arg, "--model-arg"), "--checkpoint FILE or --no-pretrained"
    with arguments.dropping(drop) as given_up:
        built = open_model(model, pretrained=pretrained, args=args, checkpoint=checkpoint, instead=instead)
        resample(built, size=pixels)
        loader = calibration_images(data, built, images, size=pixels)
        with progress("measuring layers", passes(len(find_hosts(built)), keep)) as advance:
            found = measure_sensitivity(
                built.to(place), loader, keep=keep, linear=plan, drop=given_up, images=images, advance=advance
            )
    plot_sensitivity(found, output)
    if as_json:
        print_json({"model": model, "plot": str(output), **asdict(found)})
        return
    print_sensitivity(found)
    say(f"Plot: {output}")


@app.command("pareto", short_help="Accuracy over speed, of a comparison.")
def pareto(
    stores: Annotated[list[Path], typer.Argument(metavar="STORE...", help="What `linvit compare` wrote, or archives.")],
    output: Annotated[Path, arguments.output("FILE", "The picture.")] = Path("pareto.png"),
    as_json: Json = False,
) -> None:
    """Plot the accuracy of a comparison's candidates over their speed, or over their MACs where no speed was measured.

    \b
    Example: linvit show pareto runs/imagenette -o pareto.png
    """
    from dataclasses import asdict

    from linvit.comparison.reporting.fronts import fronts
    from linvit.figures.pareto import plot_pareto
    from linvit.figures.style import check_picture

    check_picture(output)
    panels = fronts(stores)
    plot_pareto(panels, output)
    if as_json:
        print_json({"plot": str(output), "settings": [asdict(panel) for panel in panels]})
        return
    out = console()
    for panel in panels:
        out.print(panel.title, style="bold")
        order = sorted(panel.candidates, key=lambda c: -c.score)
        rows = ((c.name, f"{c.score:.2f}", f"{c.x:.3g}", "◂ front" if c.front else "") for c in order)
        out.print(table(rows, **{"candidate": 28, panel.ylabel: -9, panel.xlabel: -9, " ": 7}))
        out.print(panel.note, style="italic")
    say(f"Plot: {output}")
