"""The command line: one file per verb, which parses, calls and prints.

A new verb is a file here, a line at the end of this one, one in linvit_command.py and one in tests/cli/test_cli.py. Its
function's signature is its options, its docstring its help, with an example in the last paragraph after `\\b`. Import
anything heavy (torch, timm, matplotlib) inside the function. `linvit.cli.output` has `--json`, tables and
the progress bar. For a user's mistake raise LinvitError; `main` prints it as one line and exits with 2.
"""

import logging
import sys
import warnings
from collections.abc import Callable, Sequence

from linvit.cli import bench_edge, compare, convert, export, plan, predict, push, report, serve, show, tables, theory
from linvit.cli import eval as eval_verb
from linvit.cli import list as list_verb
from linvit.cli import train as train_verb
from linvit.cli.output import flush, say, settle_streams
from linvit.errors import LinvitError, Unreadable
from linvit.files import is_full
from linvit_command import VERBS, make_app

app = make_app()


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 when it did what was asked, 2 for a user's mistake."""
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")  # advice of torch.compile, and not ours
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # what torchao, beside transformers, is told
    settle_streams()
    try:
        try:
            app(args)
        finally:
            flush()
    except LinvitError as mistake:
        message = str(mistake) if isinstance(mistake, Unreadable) else " ".join(str(mistake).split())
    except OSError as mistake:
        if mistake.filename is None and not is_full(mistake):
            raise
        message = f"{mistake.filename or 'cannot write'}: {mistake.strerror}"
    say(f"error: {message}", err=True)
    sys.exit(2)


FUNCTIONS: dict[str, Callable[..., None]] = {
    "list": list_verb.list_,
    "tables": tables.tables,
    "theory": theory.theory,
    "plan": plan.plan,
    "convert": convert.convert,
    "train": train_verb.train,
    "eval": eval_verb.eval_,
    "predict": predict.predict,
    "export": export.export,
    "push": push.push,
    "compare": compare.compare,
    "report": report.report,
    "serve": serve.serve,
}
GROUPS = {"bench": bench_edge.app, "show": show.app}  # verbs with verbs of their own
for name, function in FUNCTIONS.items():
    app.command(name, short_help=VERBS[name])(function)
for name, group in GROUPS.items():
    app.add_typer(group, name=name, short_help=VERBS[name])
