"""`linvit theory`: what the papers prove, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linvit.cli.output import Json, console, print_json, progress, table

if TYPE_CHECKING:
    from linvit.measurement.theory import Finding


def theory(
    samples: Annotated[int, typer.Option(help="Random pairs per row; sums over tokens take fewer.")] = 200_000,
    seed: Annotated[int, typer.Option(help="Seed of the random numbers.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the findings, as .png, .svg or .pdf.")] = None,
    as_json: Json = False,
) -> None:
    """Measure MixA's theorems, Castling's series and QT's kernel against their closed forms.

    Each row is a Monte Carlo estimate with its 95 % interval (for all rows together) and the number the formula gives.

    \b
    Example: linvit theory --plot theory.png
    """
    from linvit.measurement.theory import CONFIDENCE, PARTS, TOPICS, measure

    if plot is not None:
        from linvit.figures import check_picture, plot_theory

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
    out = console()
    for key, topic in TOPICS.items():
        out.print(f"[bold]{topic.title}[/bold]")
        out.print(rows_of([f for f in findings if f.topic == key]))
        out.print(f"{topic.meaning}\n", style="italic")
    held = [f.inside for f in findings if f.inside is not None and not f.wrong]
    out.print(f"{sum(held)} of {len(held)} closed forms lie inside their interval ({samples:,} samples, seed {seed}).")
    if plot is not None:
        out.print(f"Plot: {plot}")


def rows_of(findings: list[Finding]) -> object:
    columns = {"quantity": 33, "d": -3, "N": -3, "measured": -9, "95 % interval": 21, "formula": -9, "inside": 6}
    made = table(**columns)
    for f in findings:
        made.add_row(
            f.quantity,
            "" if f.d is None else str(f.d),
            "" if f.tokens is None else str(f.tokens),
            number(f.measured),
            f"{number(f.low)} … {number(f.high)}" if f.error else "rounding",
            "–" if f.expected is None else number(f.expected),
            verdict(f),
        )
    return made


def verdict(finding: Finding) -> str:
    if finding.inside is None:
        return "–"
    return "[green]yes[/green]" if finding.inside else "[yellow]no[/yellow]" if finding.wrong else "[red]no[/red]"


def number(x: float) -> str:
    """Four digits."""
    return f"{x:#.4g}".rstrip(".") if 1e-3 <= abs(x) < 1e4 else f"{x:.2e}" if x else "0"
