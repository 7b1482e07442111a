"""The command line: one file per verb, which parses, calls and prints.

A new verb is a file here, a line at the end of this one and one in tests/cli/test_cli.py. Its function's signature is
its options, its docstring its help, with an example in the last paragraph after `\\b`. Import anything heavy (torch,
timm, matplotlib) inside the function: `linvit --help` imports every verb. `linvit.cli.output` has `--json`, tables and
the progress bar. For a user's mistake raise LinvitError; `main` prints it as one line and exits with 2.
"""

import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from linvit.cli import bench, compare, convert, plan, predict, report, show, tables, theory, train
from linvit.cli import eval as eval_verb
from linvit.cli import list as list_verb
from linvit.errors import LinvitError
from linvit.version import __version__

plain: Any = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
app = typer.Typer(
    name="linvit", no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}, **plain
)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 when it did what was asked, 2 for a user's mistake."""
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # advice of torch.compile, and not ours
    try:
        app(args)
    except LinvitError as mistake:
        message = str(mistake)
    except OSError as mistake:
        if mistake.filename is None:
            raise
        message = f"{mistake.filename}: {mistake.strerror}"
    print("error:", " ".join(message.split()), file=sys.stderr)
    sys.exit(2)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"linvit {__version__}")
        raise typer.Exit()


@app.callback()
def linvit(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Make the attention of vision transformers linear, and see honestly what that buys.

    \b
    Example: linvit list
    """


# The verbs, in the order of the help. A verb with verbs of its own: app.add_typer(bench.app, name="bench").
app.command("list")(list_verb.list_)
app.command("tables")(tables.tables)
app.command("theory")(theory.theory)
app.command("plan")(plan.plan)
app.command("convert")(convert.convert)
app.command("train")(train.train)
app.command("eval")(eval_verb.eval_)
app.command("predict")(predict.predict)
app.command("compare")(compare.compare)
app.command("report")(report.report)
app.add_typer(bench.app, name="bench")
app.add_typer(show.app, name="show")
