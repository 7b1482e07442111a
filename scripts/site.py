"""mkdocs' hook: what the site takes from the sources and folders themselves, so that it needs no line for a new thing.

A folder in the navigation stands for all of its pages. A page of docs/api/ that says `::: linvit.room` gets what the
room's `__all__` names, each from where it is defined; `::: linvit` itself becomes a table that leads there.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent.parent / "src"
HEADLESS = "{members: false, show_root_heading: false, show_root_toc_entry: false}"
DIRECTIVE = re.compile(r"^::: (linvit[\w.]*)$", re.MULTILINE)


def on_config(config: Any) -> Any:
    docs = Path(config["docs_dir"])
    config["nav"] = [
        {title: pages(docs, target) if str(target).endswith("/") else target for title, target in entry.items()}
        for entry in config["nav"]
    ]
    return config


def pages(docs: Path, folder: str) -> list[str]:
    """The pages of a folder, its index first."""
    found = sorted((docs / folder).glob("*.md"), key=lambda path: (path.stem not in ("index", "README"), path.stem))
    return [f"{folder}{path.name}" for path in found]


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if not page.file.src_uri.startswith("api/"):
        return markdown
    rooms = {path.stem for path in Path(page.file.abs_src_path).parent.glob("*.md")} - {"index"}
    return DIRECTIVE.sub(lambda found: contents(found[1], rooms), markdown)


def contents(module: str, rooms: set[str]) -> str:
    """A module's docstring, then what it offers: in full, or where a room's page has it, as a row that links there."""
    rows, parts = (
        [],
        [f"::: {module}\n    options: {HEADLESS}"],
    )
    for name in exports(module):
        home = definition(module, name)
        room = next((room for room in rooms if home.startswith(f"linvit.{room}.")), None)
        if module == "linvit" and room:
            rows.append(f"| [`{name}`][{home}] | {summary(home)} |")
        elif not name.startswith("_"):
            parts.append(f"::: {home}")
    table = "\n".join(["| name | what it is |", "|---|---|", *rows])
    return "\n\n".join([parts[0], *([table] if rows else []), *parts[1:]])


@cache
def source(module: str) -> ast.Module:
    place = SOURCES.joinpath(*module.split("."))
    path = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def exports(module: str) -> list[str]:
    """What `__all__` names, in its order."""
    for node in source(module).body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets):
            return list(ast.literal_eval(node.value))
    return []


def definition(module: str, name: str) -> str:
    """Where a name is defined, through whatever re-exports it, those for type checkers included."""
    for node in ast.walk(source(module)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("linvit"):
            for imported in node.names:
                if (imported.asname or imported.name) == name:
                    return definition(node.module, imported.name)
    return f"{module}.{name}"


def summary(path: str) -> str:
    """The first sentence of what is defined there."""
    module, _, name = path.rpartition(".")
    for node in source(module).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")
    return ""
