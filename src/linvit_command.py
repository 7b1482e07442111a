"""The command `linvit`, before anything is imported that takes time.

`import linvit` registers models with timm, and so takes seconds. The list of verbs, the version and the shell's
completion of a verb need nothing of it: that is why this module lies beside the package and not in it. As soon as a
verb is meant, `linvit.cli` takes over.
"""

import os
import signal
import sys
from typing import Any


def leave(*_: Any) -> None:
    """End at once and without a word: an interrupted import would be a traceback."""
    os._exit(130)


def leave_on_interrupt() -> None:
    """For the command, which has nothing under way before a verb is; a program that hears Ctrl-C itself goes on so."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)


if "linvit" not in sys.modules:
    leave_on_interrupt()

import runpy  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from importlib.util import find_spec  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Annotated  # noqa: E402

import typer  # noqa: E402
from typer.core import TyperGroup  # noqa: E402

VERBS = {  # in the order of the help; `linvit.cli` has what they do
    "list": "What there is to choose from, and what recipes say.",
    "tables": "The papers' parameters and MACs beside ours.",
    "theory": "The papers' theorems, measured.",
    "plan": "Measure which layers of a model pay to convert.",
    "convert": "Swap the attention of a model, keep the weights.",
    "train": "Train, fine-tune or distil a model by a recipe.",
    "eval": "Measure what a model gets right.",
    "predict": "Tell what is on photographs.",
    "export": "Write a model for another runtime, verified.",
    "push": "Send a model to the Hugging Face hub.",
    "compare": "Compare mechanisms fairly, here or on a cluster.",
    "report": "Write the report of a comparison.",
    "serve": "Show on a page what the attention does.",
    "bench": "Measure speed and memory against softmax.",
    "show": "Draw what attention does, and what was measured.",
}


class Verbs(TyperGroup):
    """A group that lists its verbs without having them."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        super().resolve_command(ctx, args)  # a verb that does not exist is an error here
        from linvit.cli import main

        if signal.getsignal(signal.SIGINT) is leave:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        main(args)


def version() -> str:
    """linvit's version, without importing it."""
    spec = find_spec("linvit")
    assert spec is not None and spec.submodule_search_locations
    found: str = runpy.run_path(str(Path(spec.submodule_search_locations[0], "version.py")))["__version__"]
    return found


def print_version(wanted: bool) -> None:
    if wanted:
        print(f"linvit {version()}")
        raise typer.Exit()


def name_modules(modules: list[str] | None) -> None:
    """Modules with mechanisms of the user's own, for this process and those it starts; see linvit.attention.plugins."""
    if modules:
        named = [*modules, *filter(None, [os.environ.get("LINVIT_MODULES")])]
        os.environ["LINVIT_MODULES"] = ",".join(named)


def make_app(**settings: Any) -> typer.Typer:
    """The command without its verbs."""
    plain: Any = {"rich_markup_mode": None, "pretty_exceptions_enable": False, **settings}
    names = {"help_option_names": ["-h", "--help"]}
    app = typer.Typer(name="linvit", no_args_is_help=True, context_settings=names, **plain)

    @app.callback()
    def linvit(
        version: Annotated[
            bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print it.")
        ] = False,
        modules: Annotated[
            list[str] | None,
            typer.Option(
                "--import", metavar="MODULE", callback=name_modules, is_eager=True, help="Yours, with a mechanism."
            ),
        ] = None,
    ) -> None:
        """Make the attention of vision transformers linear, and see honestly what that buys.

        \b
        Example: linvit convert deit_small_patch16_224 --plan mixa -o deit_s_mixa
        """

    return app


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    app = make_app(cls=Verbs)
    for verb, summary in VERBS.items():
        app.command(verb, short_help=summary)(lambda: None)
    app(sys.argv[1:] if args is None else args)
