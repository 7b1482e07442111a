"""`linvit serve`: a page that shows what the attention does."""

from typing import Annotated

import typer

from linvit.cli import arguments
from linvit.cli.output import Json, console, flush, print_json, say
from linvit.errors import LinvitError

PORT = 8765


def serve(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL…", help="Folders linvit saved, runs, or timm models.")
    ] = None,
    plan: arguments.PlanTexts = "",
    size: arguments.Size = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where it listens; 0 takes a free one.")] = PORT,
    host: Annotated[str, typer.Option(help="Whom it listens to: this machine alone unless told.")] = "127.0.0.1",
    pretrained: arguments.Pretrained = True,
    fetch: Annotated[bool, typer.Option("--fetch", help="Models named on the page fetch timm's weights too.")] = False,
    device: arguments.Device = "auto",
    as_json: Json = False,
) -> None:
    """Show what two mechanisms do to a picture, on a page of this machine: what the model says, attention that follows
    the pointer, rollout, features, and latency as the resolution moves. Ctrl-C ends it.

    Only models named here and timm's can be opened from the page. Pictures stay in memory and go nowhere.

    \b
    Example: linvit serve runs/imagenette deit_tiny_patch16_224 --plan "as it is,mixa:keep=6"
    """
    try:
        from linvit.page import Page, run_server
    except ModuleNotFoundError as error:
        if error.name not in ("starlette", "uvicorn", "anyio", "h11"):
            raise
        raise LinvitError("linvit serve needs starlette and uvicorn: pip install linvit[serve]") from None
    from linvit.conversion.plan import split_plans
    from linvit.page.app import listen
    from linvit.page.catalogue import USUAL, Catalogue

    listen(host, port).close()  # told before models are opened
    if not as_json:
        console(stderr=True).print("opening models")
    try:
        catalogue = Catalogue(models or [USUAL], split_plans(plan), pretrained=pretrained, fetch=fetch, device=device)
    except LinvitError:
        if models or not pretrained:
            raise
        catalogue = Catalogue([USUAL], split_plans(plan), pretrained=False, fetch=fetch, device=device)
    page = Page(catalogue, arguments.square_size(size))
    page.warm()

    def ready(address: str) -> None:
        if as_json:
            print_json({"address": address})
        else:
            notes = [f"{base.name} has {base.note}" for base in catalogue.named.values() if base.note]
            say(*notes, f"{address}  (Ctrl-C ends it)")
        flush()

    run_server(page, host, port, ready)
