"""`linvit push`: a saved model, with its card, to the Hugging Face hub."""

from pathlib import Path
from typing import Annotated

import typer

from linvit.cli.output import Json, console, print_json, styled, table


def push(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A model that linvit saved, such as runs/x/best.")],
    repo: Annotated[str, typer.Argument(metavar="USER/NAME", help="Its name on the hub.")],
    revision: Annotated[str, typer.Option(help="A branch to push to, made where there is none.")] = "",
    private: Annotated[bool, typer.Option("--private", help="Make the repository private where it is new.")] = False,
    bench: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="A result of linvit bench, for the card.")
    ] = None,
    message: Annotated[str, typer.Option(help="What the commit says.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files and the card, and send nothing.")] = False,
    as_json: Json = False,
) -> None:
    """Send a model, with a card from its run, to the Hugging Face hub: linvit.load("hf-hub:USER/NAME") reads it.

    The card tells data, teacher, metrics before and after, plan, and speeds where a result of linvit bench is given or
    lies beside the model. A README.md of your own stays as it is. Log in with `hf auth login`, or set HF_TOKEN.

    \b
    Example: linvit push runs/deit_s_mixa/best user/deit-small-mixa --dry-run
    """
    from linvit.conversion import push_to_hub
    from linvit.conversion.hub.pushing import prepare

    ready = prepare(folder, repo, bench or ())
    address = ""
    if not dry_run:
        given = {"revision": revision or None, "private": private or None, "message": message, "bench": bench or ()}
        address = push_to_hub(folder, repo, **given)  # type: ignore[arg-type]
    if as_json:
        print_json({"repo": ready.repo, "files": dict(ready.files), "card": ready.card, "address": address or None})
        return
    out = console()
    out.print(table([(name, f"{size:,}") for name, size in ready.files], file=12, bytes=-6))
    if dry_run:
        print(ready.card)
        out.print(f"A dry run: nothing was sent to {ready.repo}.", style="italic")
    else:
        out.print(styled((f"Sent to {address}: linvit.load('hf-hub:{ready.repo}') reads it.", "italic")))
