"""mkdocs' hook: a folder in the navigation stands for all of its pages, so that a new mechanism needs no line there."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    config["nav"] = expand(config["nav"], Path(config["docs_dir"]))
    return config


def expand(nav: list[Any], docs: Path) -> list[Any]:
    """The navigation with `{title: "folder/"}` replaced by the folder's pages, its index first."""
    return [
        {title: pages(docs, target) if str(target).endswith("/") else target for title, target in entry.items()}
        for entry in nav
    ]


def pages(docs: Path, folder: str) -> list[str]:
    found = sorted((docs / folder).glob("*.md"), key=lambda path: (path.stem not in ("index", "README"), path.stem))
    return [f"{folder}{path.name}" for path in found]
