"""`linvit list`: what there is to choose from."""

from __future__ import annotations

from typing import Annotated

import typer

from linvit.cli.output import Json, print_json


def list_(
    what: Annotated[str, typer.Argument(help="mechanisms, models or plans.")] = "mechanisms",
    as_json: Json = False,
) -> None:
    """List the mechanisms, models or plans.

    \b
    Example: linvit list mechanisms --json
    """
    from linvit.attention import list_mechanisms

    print_json(list_mechanisms())
