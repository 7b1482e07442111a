"""`linvit theory`: what the papers prove, measured."""

from typing import TYPE_CHECKING, Annotated

import typer

from linvit.cli import arguments
from linvit.cli.output import Json, console, print_json, progress, table

if TYPE_CHECKING:
    from linvit.measurement.theory import Finding

COLUMNS = {"quantity": 33, "d": -3, "N": -3, "measured": -9, "95 % interval": 21, "formula": -9, "inside": 6}


def theory(
    samples: Annotated[int, typer.Option(help="Random pairs per row; sums over tokens take fewer.")] = 200_000,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    plot: arguments.Picture = None,
    as_json: Json = False,
) -> None:
    """Measure MixA's theorems, Castling's series and QT's kernel against their closed forms.

    Each row is a Monte Carlo estimate with its 95 % interval (for all rows together) and the number the formula gives.

    \b
    Example: linvit theory --plot theory.png
    """
    from linvit.figures import check_picture, plot_theory
    from linvit.measurement.theory import CONFIDENCE, PARTS, TOPICS, measure

    if plot is not None:
        check_picture(plot)
    with progress("measuring", len(PARTS)) as advance:
        findings = measure(samples, seed, advance)
    if plot is not None:
        plot_theory(findings, plot)
    if as_json:
        topics = {key: {"title": topic.title, "meaning": topic.meaning} for key, topic in TOPICS.items()}
        rows = [finding.as_dict() for finding in findings]
        setting = {"samples": samples, "seed": seed, "confidence": CONFIDENCE}
        print_json({**setting, "topics": topics, "findings": rows, "plot": None if plot is None else str(plot)})
        return
    out = console(markup=True)
    for key, topic in TOPICS.items():
        out.print(f"[bold]{topic.title}[/bold]")
        out.print(table((cells(f) for f in findings if f.topic == key), **COLUMNS))
        out.print(f"{topic.meaning}\n", style="italic")
    held = [f.inside for f in findings if f.inside is not None and not f.wrong]
    out.print(f"{sum(held)} of {len(held)} closed forms lie inside their interval ({samples:,} samples, seed {seed}).")
    if plot is not None:
        out.print(f"Plot: {plot}")


def cells(f: "Finding") -> tuple[object, ...]:
    interval = f"{number(f.low)} … {number(f.high)}" if f.error else "rounding"
    verdict = "[green]yes[/green]" if f.inside else "[yellow]no[/yellow]" if f.wrong else "[red]no[/red]"
    formula, inside = ("–" if f.expected is None else number(f.expected)), "–" if f.inside is None else verdict
    d, tokens = ("" if size is None else size for size in (f.d, f.tokens))
    return f.quantity, d, tokens, number(f.measured), interval, formula, inside


def number(x: float) -> str:
    """Four digits."""
    return f"{x:#.4g}".rstrip(".") if 1e-3 <= abs(x) < 1e4 else f"{x:.2e}" if x else "0"
