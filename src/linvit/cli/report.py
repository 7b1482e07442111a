"""`linvit report`: what a comparison found, as one page."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from linvit.cli import arguments
from linvit.cli.arguments import check_file
from linvit.cli.compare_output import json_rows
from linvit.cli.output import Json, print_json, say
from linvit.codec import to_plain
from linvit.errors import LinvitError


def report(
    stores: Annotated[list[Path], typer.Argument(metavar="STORE...", help="What `linvit compare` wrote, or archives.")],
    output: Annotated[Path | None, arguments.output("FILE", "The page; report.html if alone.")] = None,
    md: Annotated[str, typer.Option("--md", metavar="FILE", help="Write Markdown; - prints it.")] = "",
    csv: Annotated[str, typer.Option("--csv", metavar="FILE", help="A line for each run and timing; - prints.")] = "",
    as_json: Json = False,
) -> None:
    """Write the report of a comparison: one page that works offline, Markdown, or CSV.

    Several stores make one report; the same run in two of them counts once.

    \b
    Example: linvit report runs/digits -o report.html --md results.md
    """
    from linvit.comparison import report as write_report
    from linvit.comparison.reporting import markdown, spreadsheet
    from linvit.files import write

    if [md, csv].count("-") + as_json > 1:
        raise LinvitError("only one of --md -, --csv - and --json can go to the terminal: give files for the others")
    if output is None and not (md or csv or as_json):
        output = Path("report.html")
    targets = [path for path in (output, *(Path(name) for name in (md, csv) if name not in ("", "-"))) if path]
    for path in targets:
        check_file(path)
    contents = write_report(stores, output)
    if not as_json:
        say(*contents.results.notes, err=True)
    for name, make in ((md, markdown), (csv, spreadsheet)):
        if name == "-":
            sys.stdout.write(make(contents))
        elif name:
            write(Path(name), make(contents))
    if as_json:
        settings = [{"title": s.title, "mode": s.mode, "rows": json_rows(s)} for s in contents.settings]
        failures = [{"key": f.key, "label": to_plain(f.label), "error": f.error} for f in contents.results.failures]
        told = {"answer": list(contents.answer.sentences), "settings": settings, "failures": failures}
        print_json({**told, "notes": contents.results.notes, "files": [str(path) for path in targets]})
    elif "-" not in (md, csv):
        say(*contents.answer.sentences)
        say(*(f"Report: {path}" for path in targets))
