"""`linvit show`: pictures of what models do and of what was measured."""

from pathlib import Path
from typing import Annotated

import typer

from linvit.cli import arguments, show_models
from linvit.cli.output import Json, console, print_json, say, table

app = typer.Typer(help="Draw what attention does, and what was measured.", no_args_is_help=True)
app.command("maps")(show_models.maps)
app.command("features")(show_models.features)


@app.command("masks")
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
