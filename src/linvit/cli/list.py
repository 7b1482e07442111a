"""`linvit list`: what there is to choose from."""

import inspect
from dataclasses import asdict
from itertools import groupby
from typing import Annotated, Any

import typer

from linvit.cli.output import Json, console, print_json, table
from linvit.errors import unknown

# Words for capabilities: said of a mechanism when it has them, or when it lacks what nearly every other has.
HAS = {"bias": "takes bias", "grid": "needs grid", "input": "needs x", "between": "block step"}
LACKS = {
    **{"normalised": "grows with N", "any_tokens": "fixed N", "unequal": "no pooled keys", "wide_values": "no wide v"},
    **{"key_mask": "no key mask", "prefix": "no prefix", "map": "no map", "value": "ignores v", "rotary": "no rotary"},
}
Rows = list[dict[str, Any]]


def list_(
    what: Annotated[str, typer.Argument(metavar="[mechanisms|models|plans]", help="One kind; all unless told.")] = "",
    as_json: Json = False,
) -> None:
    """List the mechanisms with their capabilities, the models and the plans.

    \b
    Example: linvit list mechanisms
    """
    kinds = {
        "mechanisms": (mechanisms, print_mechanisms),
        "models": (models, print_models),
        "plans": (plans, print_plans),
    }
    if what and what not in kinds:
        raise unknown("thing to list", what, kinds)
    found = {kind: rows() for kind, (rows, _) in kinds.items() if what in ("", kind)}
    if as_json:
        print_json(found)
        return
    for position, (kind, listed) in enumerate(found.items()):
        if position:
            console().print()
        kinds[kind][1](listed)


def mechanisms() -> Rows:
    from linvit.attention import TokenGrid, create_attention, list_mechanisms, options_of

    rows = []
    for name in list_mechanisms():
        made = create_attention(name, heads=2, head_dim=8, grid=TokenGrid(4, 4))  # capabilities may depend on options
        options = {option: default for option, default in options_of(name).items() if option != "variant"}
        row = {"name": name, "paper": made.paper, "variants": list(made.variants), "options": options}
        rows.append(row | {"capabilities": asdict(made.capabilities)})
    return rows


def models() -> Rows:
    from linvit.models import list_models

    return [{"name": name} for name in list_models()]


def plans() -> Rows:
    from linvit.conversion.plan import PLANS

    rows = []
    for name, plan in sorted(PLANS.items()):
        parameters = inspect.signature(plan).parameters.values()
        options = {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        paragraph = " ".join((inspect.getdoc(plan) or "").split("\n\n")[0].split())
        summary = paragraph.split(". ")[0].rstrip(".") + "."  # the first sentence of its docstring
        rows.append({"name": name, "summary": summary, "options": options})
    return rows


def print_mechanisms(rows: Rows) -> None:
    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        cost, differs = "N" if row["capabilities"]["linear"] else "N²", "\n".join(differences(row["capabilities"]))
        options = "\n".join(f"{option}={default}" for option, default in row["options"].items())
        return f"[bold]{row['name']}[/bold]", row["paper"], cost, differs, "\n".join(row["variants"]), options

    out = console()
    out.print(table(map(cells, rows), mechanism=14, paper=27, cost=4, differs=14, variants=11, options=16))
    out.print(
        "Unless “differs” says otherwise a mechanism takes any number of tokens, prefix tokens, pooled keys, "
        "wide values, key masks and rotary position, and has a map. The first variant is the default.",
        style="italic",
    )


def differences(capabilities: dict[str, Any]) -> list[str]:
    """Where a mechanism differs from the usual one, in words."""
    words = [word for name, word in HAS.items() if capabilities[name]]
    return words + [word for name, word in LACKS.items() if not capabilities[name]]


def print_models(rows: Rows) -> None:
    families = groupby((row["name"] for row in rows), key=lambda name: name.split("_")[0])
    cells = ((f"[bold]{family}[/bold]", "  ".join(members)) for family, members in families)
    out = console()
    out.print(table(cells, family=10, models=40))
    text = (
        "Build them with timm.create_model(name) after import linvit. Those that detect or segment want backbone='…'."
    )
    out.print(text, style="italic")


def print_plans(rows: Rows) -> None:
    options = (", ".join(f"{option}={default}" for option, default in row["options"].items()) for row in rows)
    cells = ((f"[bold]{row['name']}[/bold]", row["summary"], text) for row, text in zip(rows, options, strict=True))
    out = console()
    out.print(table(cells, plan=10, summary=40, options=20))
    out.print("Every mechanism's name is a plan as well: that mechanism in every layer.", style="italic")
