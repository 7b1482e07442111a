"""`linvit tables`: the papers' numbers beside ours."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from linvit.cli.output import WIDTH, Json, console, print_json, table, tracked
from linvit.errors import unknown

if TYPE_CHECKING:
    from linvit.measurement.published import Table
    from linvit.measurement.tables import Cell, TableRow


def tables(
    name: Annotated[str | None, typer.Argument(help="fair, qtvit, mobile or castling; all unless told.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 when a row that should match does not.")] = False,
    as_json: Json = False,
) -> None:
    """Print the papers' parameters and MACs beside ours, with the error.

    A number that should match and does not is marked ✗; where the paper's own cell is inconsistent a note says how.

    \b
    Example: linvit tables fair --check
    """
    from linvit.measurement.published import TABLES
    from linvit.measurement.tables import compare_table

    if name is not None and name not in TABLES:
        raise unknown("table", name, TABLES)
    everything: list[TableRow] = []
    told = {}
    for key, found in TABLES.items() if name is None else [(name, TABLES[name])]:
        rows = list(tracked(compare_table(found), f"counting {key}", len(found.rows)))
        told[key] = as_dict(found, rows)
        everything += rows
        if not as_json:
            print_table(found, rows)
    if as_json:
        print_json(told)
    if any(row.failure for row in everything) or (check and any(row.wrong for row in everything)):
        raise typer.Exit(1)


def print_table(found: Table, rows: list[TableRow]) -> None:
    from rich.markup import escape
    from rich.table import Table as Grid

    out = console(markup=True)
    out.print(f"[bold]{found.title}[/bold]  parameters in millions, {operations(found)} in billions")
    out.print(found.remark, style="italic")
    notes: list[str] = []
    left, wide = iter(rows), out.width >= WIDTH  # where all sections' columns can stand below each other
    for section in found.sections:
        made = table()
        room: Any = (lambda width: {"no_wrap": True, "width": width}) if wide else lambda width: {"overflow": "fold"}
        made.add_column(section.title, **room(24))
        headings = ("params", "ours", "error", f"G{operations(found)}", "ours", "error", "accuracy", "note")
        for heading, width in zip(headings, (6, 7, 9, 6, 7, 9, 10, 4), strict=True):
            made.add_column(heading, justify="right", **room(width))
        for row in (next(left) for _ in section.rows):
            text = row.failure or row.printed.note
            if text and text not in notes:
                notes.append(text)
            note = str(notes.index(text) + 1) if text else ""
            made.add_row(row.printed.label, *cells(row.params, row), *cells(row.macs, row), row.printed.accuracy, note)
        out.print(made)
    grid = Grid.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", width=3)
    grid.add_column()
    for number, text in enumerate(notes, start=1):
        grid.add_row(str(number), escape(text))
    out.print(grid)
    out.print(summary(found, rows) + "\n")


def operations(found: Table) -> str:
    return "FLOPs" if found.convention == "fvcore" else "MACs"


def cells(cell: Cell, row: TableRow) -> tuple[str, str, str]:
    """Published, ours and the error with its mark."""
    if row.failure:
        return cell.published, "[red]failed[/red]", "[red]✗[/red]"
    ours = "–" if cell.ours is None else f"{cell.ours:.3f}"
    if cell.error is None:
        return cell.published, ours, ""
    percent = round(100 * cell.error, 2)
    error = f"{percent:+.2f}%".replace("-", "−") if percent else "0.00%"
    if cell.agrees:
        return cell.published, ours, f"{error} [green]✓[/green]"
    return cell.published, ours, f"[red]{error} ✗[/red]" if cell.must else f"[yellow]{error}[/yellow]  "


def summary(found: Table, rows: list[TableRow]) -> str:
    """How many of the printed numbers agree."""
    near = f"within {100 * found.tolerance:g} % or to the printed digit"
    lines = []
    for what, how, column in (("parameters", "to the printed digit", "params"), (operations(found), near, "macs")):
        column_cells = [getattr(row, column) for row in rows]
        printed = [cell for cell in column_cells if cell.published and cell.ours is not None]
        not_built = sum(bool(getattr(row, column).published) and not row.printed.model for row in rows)
        wrong = sum(cell.wrong for cell in column_cells)
        explained = sum(not cell.agrees and not cell.wrong for cell in printed)
        line = f"{what}: {sum(cell.agrees for cell in printed)} of {len(printed)} {how}"
        line += f", {explained} explained above" if explained else ""
        line += f", {not_built} not built here" if not_built else ""
        lines.append(line + (f", [red]{wrong} wrong[/red]" if wrong else ""))
    return "\n".join(lines)


def as_dict(found: Table, rows: list[TableRow]) -> dict[str, Any]:
    def cell(c: Cell) -> dict[str, Any]:
        published, agrees = float(c.published) if c.published else None, c.agrees if c.error is not None else None
        return {"published": published, "ours": c.ours, "error": c.error, "agrees": agrees, "must_agree": c.must}

    def line(section: str, row: TableRow) -> dict[str, Any]:
        printed = row.printed
        named = {"section": section, "label": printed.label.strip(), "model": printed.model or None}
        built = {"options": dict(printed.options), "size": list(printed.size)}
        counted = {"params_millions": cell(row.params), "macs_billions": cell(row.macs)}
        said = {"accuracy": printed.accuracy or None, "note": printed.note or None, "failure": row.failure or None}
        return {**named, **built, **counted, **said}

    sections = [section.title for section in found.sections for _ in section.rows]
    head = {"title": found.title, "remark": found.remark, "convention": found.convention, "tolerance": found.tolerance}
    return {**head, "rows": [line(*pair) for pair in zip(sections, rows, strict=True)]}
