"""`linvit list`: what there is to choose from."""

import inspect
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import groupby
from typing import Annotated, Any

import typer

from linvit.cli import arguments
from linvit.cli.output import Json, console, print_json, table
from linvit.errors import LinvitError, unknown

# Words for capabilities: said of a mechanism when it has them, or when it lacks what nearly every other has.
HAS = {"bias": "takes bias", "grid": "needs grid", "input": "needs x", "between": "block step"}
LACKS = {
    **{"normalised": "grows with N", "any_tokens": "fixed N", "unequal": "no pooled keys", "wide_values": "no wide v"},
    **{"key_mask": "no key mask", "prefix": "no prefix", "map": "no map", "value": "ignores v", "rotary": "no rotary"},
}
Rows = list[dict[str, Any]]
KINDS = ("mechanisms", "models", "plans", "recipes", "settings")


def list_(
    what: Annotated[str, typer.Argument(metavar=f"[{'|'.join(KINDS)}]", help="One kind; most unless told.")] = "",
    recipe: Annotated[str, typer.Argument(metavar="[RECIPE]", help="With settings: the recipe to show.")] = "",
    task: arguments.Task = "",
    as_json: Json = False,
) -> None:
    """List the mechanisms with their capabilities, the models, the plans and the recipes.

    `linvit list settings RECIPE` shows every setting that `--set` changes: its meaning, its default and the recipe's
    value. Some recipes look at the model's name, and have other values for some models.

    \b
    Example: linvit list mechanisms
    Example: linvit list settings fast
    """
    if what and what not in KINDS:
        raise unknown("thing to list", what, KINDS)
    if (recipe or task) and what != "settings":
        raise LinvitError("a recipe and --task go with settings: linvit list settings fast")
    kinds: dict[str, tuple[Callable[[], Rows], Callable[[Rows], None]]] = {
        "mechanisms": (mechanisms, print_mechanisms),
        "models": (models, print_models),
        "plans": (plans, print_plans),
        "recipes": (recipes, print_recipes),
        "settings": (partial(settings, recipe, task), partial(print_settings, recipe)),
    }
    chosen = [what] if what else [kind for kind in KINDS if kind != "settings"]
    found = {kind: kinds[kind][0]() for kind in chosen}
    if as_json:
        print_json(found)
        return
    for position, (kind, listed) in enumerate(found.items()):
        if position:
            console(markup=True).print()
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
        rows.append({"name": name, "summary": first_sentence(plan), "options": options, "gives_up": list(plan().drop)})
    return rows


def recipes() -> Rows:
    from linvit.training.recipes import recipes_of

    return [
        {"name": name, "task": task, "summary": first_sentence(made)}
        for task in ("classify", "detect, segment", "features")
        for name, made in recipes_of(task.split(",")[0]).items()
    ]


def settings(recipe: str, task: str) -> Rows:
    from linvit.tasks.kinds import TASKS
    from linvit.training import list_recipes
    from linvit.training import recipe as named_recipe
    from linvit.training.config import list_settings

    if task not in ("", *TASKS):
        raise unknown("task", task, TASKS)
    dense = recipe not in list_recipes() and recipe in list_recipes("detect")
    return list_settings(named_recipe(recipe, task=task or ("detect" if dense else "classify")) if recipe else None)


def first_sentence(function: Callable[..., Any]) -> str:
    """The first sentence of a docstring."""
    paragraph = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".") + "."


def print_mechanisms(rows: Rows) -> None:
    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        cost, differs = "N" if row["capabilities"]["linear"] else "N²", "\n".join(differences(row["capabilities"]))
        options = "\n".join(f"{option}={default}" for option, default in row["options"].items())
        return f"[bold]{row['name']}[/bold]", row["paper"], cost, differs, "\n".join(row["variants"]), options

    out = console(markup=True)
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
    out = console(markup=True)
    out.print(table(cells, family=10, models=40))
    text = (
        "Build them with timm.create_model(name) after import linvit. Those that detect or segment want backbone='…'."
    )
    out.print(text, style="italic")


def print_plans(rows: Rows) -> None:
    options = (", ".join(f"{option}={default}" for option, default in row["options"].items()) for row in rows)
    cells = (
        (f"[bold]{row['name']}[/bold]", row["summary"], text, "\n".join(row["gives_up"]))
        for row, text in zip(rows, options, strict=True)
    )
    out = console(markup=True)
    out.print(table(cells, **{"plan": 10, "summary": 36, "options": 18, "gives up": 18}))
    out.print(
        "“gives up”: what of a model the plan goes without where its mechanisms cannot honour it; anything else is an "
        "error until --drop names it. Every mechanism's name is a plan as well, which gives up nothing by itself: that "
        "mechanism in every layer.",
        style="italic",
    )


def print_recipes(rows: Rows) -> None:
    cells = ((f"[bold]{row['name']}[/bold]", row["task"], row["summary"]) for row in rows)
    out = console(markup=True)
    out.print(table(cells, recipe=12, task=15, summary=50))
    out.print("linvit list settings RECIPE shows what a recipe says; --set changes it.", style="italic")


def print_settings(recipe: str, rows: Rows) -> None:
    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        words = f" ({', '.join(row['choices'])})" if row["choices"] else ""
        value, default = written(row["value"]), written(row["default"])
        shown = f"[bold]{escape(value)}[/bold]" if value != default else escape(value)
        last = row["name"].split(".")[-1]
        told = "" if "." in row["name"] and last in stages else row["meaning"] + words  # of every stage, once
        stages.update([last] if "." in row["name"] else [])
        return row["name"], *([shown] if recipe else []), escape(default), escape(told)

    from rich.markup import escape

    stages: set[str] = set()

    out = console(markup=True)
    own = {recipe: 12} if recipe else {}
    out.print(table(map(cells, rows), setting=20, **own, default=12, meaning=40))
    out.print("--set NAME=VALUE changes a setting: --set lr=1e-3 --set randaugment=none.", style="italic")


def written(value: Any) -> str:
    """A value as `--set` takes it."""
    if value is None or value == []:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(written, value)) if isinstance(value, list) else f"{value}"
