"""How every picture looks, and where it may be written: PNG, SVG or PDF, legible in print and in a README."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linvit.errors import LinvitError, unknown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".pdf", ".png", ".svg")
INK, BLUE, RED, GREY = "#1f2933", "#1f6fb4", "#c8503c", "#9aa5b1"
STYLE = {
    **{"font.size": 9, "font.family": "DejaVu Sans", "axes.titlesize": 9.5, "axes.titlelocation": "left"},
    **{"axes.edgecolor": GREY, "axes.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False},
    **{"grid.alpha": 0.25, "text.color": INK, "xtick.color": INK, "ytick.color": INK},
    **{"legend.frameon": False, "legend.fontsize": 8, "svg.hashsalt": "linvit"},
}
PHOTOGRAPHS = 110  # dots per inch where photographs are drawn, which make large files
# Lines and points of one plot, told apart by marker too, for readers who see no colour.
COLOURS = ("#d1495b", "#30638e", "#edae49", "#3d8168", "#7b5ea7", "#8d99ae")
MARKERS = "osD^vP"


def check_picture(path: Path) -> None:
    """Raise unless `path` is a picture's name in a folder that exists. Asked before the work, so that nobody waits for
    a file that cannot be saved."""
    if path.suffix.lower() not in FORMATS:
        raise unknown("picture format", path.suffix or path.name, FORMATS)
    if not path.parent.is_dir():
        raise LinvitError(f"no folder {path.parent} to put {path.name} in; make it first")


@contextmanager
def picture(path: Path, width: float, height: float, dpi: int = 150) -> "Iterator[Figure]":
    """A figure of so many inches to draw on, written to `path` in the end; the suffix names the format."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]  # its keys are a Literal of hundreds
        figure = Figure(figsize=(width, height), layout="constrained", dpi=dpi)
        yield figure
        figure.savefig(path)
    if dpi == PHOTOGRAPHS and path.suffix.lower() == ".png":
        with_fewer_colours(path)


def with_fewer_colours(path: Path) -> None:
    """A PNG with 256 colours of its own, which is a third as large and looks the same."""
    from PIL import Image

    with Image.open(path) as drawn:
        drawn.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def line(place: int) -> dict[str, Any]:
    """Colour and marker of the line at a place in a plot."""
    turn = place // len(COLOURS)  # the second time round, other markers
    return {
        "color": COLOURS[place % len(COLOURS)],
        "marker": MARKERS[(place + turn) % len(MARKERS)],
        "markersize": 4.5,
    }
