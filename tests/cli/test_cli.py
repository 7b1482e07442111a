"""What every verb owes its user, and the frozen list of verbs and options."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import typer

from linvit.cli import app
from tests.cli.conftest import Outcome

# The command line is small and frozen: a change here is a change of the interface, made on purpose.
VERBS = {
    "list": {"what", "--json"},
    "tables": {"name", "--check", "--json"},
    "theory": {"--samples", "--seed", "--plot", "--json"},
    "plan": {
        *(
            "model",
            "--size",
            "--plan",
            "--data",
            "--images",
            "--speedup",
            "--budget-ms",
            "--keep",
            "--output",
            "--plot",
        ),
        *("--drop", "--device", "--batch", "--dtype", "--mode", "--points", "--checkpoint", "--pretrained"),
        *("--model-arg", "--json"),
    },
    "convert": {
        *("model", "--plan", "--output", "--keep", "--where", "--calibrate", "--plot", "--layers", "--drop"),
        *("--option", "--size", "--patch-size", "--window-size", "--pretrained", "--checkpoint", "--model-arg"),
        *("--survey", "--json"),
    },
    "train": {
        *("model", "--data", "--output", "--recipe", "--plan", "--option", "--keep", "--drop", "--teacher", "--set"),
        *("--resume", "--size", "--pretrained", "--model-arg", "--root", "--loader", "--workers", "--device", "--json"),
        *("--task", "--head", "--pyramid"),
    },
    "eval": {
        *(
            "model",
            "--data",
            "--task",
            "--teacher",
            "--size",
            "--split",
            "--per-class",
            "--output",
            "--batch",
            "--precision",
        ),
        *("--pretrained", "--model-arg", "--root", "--loader", "--workers", "--device", "--json"),
    },
    "predict": {"model", "images", "--output", "--threshold", "--size", "--device", "--json"},
    "compare": {
        *("what", "--output", "--mode", "--model", "--model-arg", "--backbone", "--plan", "--data", "--root"),
        *("--recipe",),
        *("--set", "--seeds", "--patch-sizes", "--size", "--teacher", "--engine", "--per-gpu", "--address", "--cpus"),
        *("--only", "--retry", "--dry-run", "--show", "--merge", "--pack", "--json"),
    },
    "report": {"stores", "--output", "--md", "--csv", "--json"},
    "bench op": {
        *("--mechanism", "--option", "--preset", "--batch", "--heads", "--head-dim", "--tokens", "--bias", "--passes"),
        *("--compared", "--dtype", "--device", "--budget", "--output", "--resume", "--from", "--plot", "--json"),
    },
    "bench model": {
        *("name", "--plan", "--option", "--keep", "--drop", "--model-arg", "--size", "--batch", "--passes", "--modes"),
        *("--dtype", "--device"),
        *("--budget", "--output", "--resume", "--from", "--json"),
    },
    "bench training": {
        *("model", "--data", "--plan", "--recipe", "--set", "--steps", "--model-arg", "--root", "--loader"),
        *("--loaders", "--workers", "--device", "--output", "--resume", "--from", "--json"),
    },
    "bench scaling": {"--mechanism", "--tokens", "--json"},
    "show masks": {"run", "--output", "--json"},
}


def commands() -> Iterator[tuple[str, typer.core.TyperCommand]]:
    """Every verb that runs, those below another verb as `bench op`."""

    def walk(prefix: str, command: typer.core.TyperCommand | typer.core.TyperGroup) -> Iterator:
        if isinstance(command, typer.core.TyperGroup):
            for name, child in command.commands.items():
                yield from walk(f"{prefix} {name}".strip(), child)
        else:
            yield prefix, command

    return walk("", typer.main.get_command(app))


every = pytest.mark.parametrize("verb", [name for name, _ in commands()])


def test_verbs_and_options_are_frozen() -> None:
    found = {}
    for name, command in commands():
        found[name] = {p.opts[0] for p in command.params}
    assert found == VERBS


@every
def test_one_word_for_one_thing(verb: str) -> None:
    """A plan is --plan and an image size --size on every verb, with no second name for either."""
    (command,) = (found for name, found in commands() if name == verb)
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert not options & {"--to", "--candidates", "--plans", "--input-size", "--resolution", "--resolutions", "--sizes"}
    if {"--option", "--keep", "--drop"} & options and "--mechanism" not in options and verb != "plan":
        assert {"--plan", "--option", "--keep", "--drop"} <= options


@every
def test_help_shows_an_example(linvit: Callable[..., Outcome], verb: str) -> None:
    outcome = linvit(*verb.split(), "--help")
    assert outcome.code == 0
    assert f"Example: linvit {verb}" in outcome.out


@every
def test_json_everywhere(linvit: Callable[..., Outcome], verb: str) -> None:
    assert "--json" in linvit(*verb.split(), "--help").out


def test_wrong_verb_and_option(linvit: Callable[..., Outcome]) -> None:
    outcome = linvit("lits")
    assert outcome.code == 2 and "Did you mean 'list'?" in outcome.err
    outcome = linvit("list", "--jsn")
    assert outcome.code == 2 and "--json" in outcome.err


def test_python_m_linvit() -> None:
    from linvit import __version__

    done = subprocess.run([sys.executable, "-m", "linvit", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout == f"linvit {__version__}\n"
