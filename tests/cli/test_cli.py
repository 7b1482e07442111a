"""What every verb owes its user, and the frozen list of verbs and options."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer

from linvit.cli import app
from tests.cli.conftest import Outcome

# The command line is small and frozen: a change here is a change of the interface, made on purpose.
VERBS = {
    "list": {"what", "recipe", "--task", "--json"},
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
        *("--drop", "--device", "--batch", "--precision", "--runtime", "--points", "--checkpoint", "--pretrained"),
        *("--model-arg", "--json"),
    },
    "convert": {
        *("model", "--plan", "--output", "--keep", "--where", "--calibrate", "--plot", "--layers", "--drop"),
        *("--option", "--size", "--patch-size", "--window-size", "--pretrained", "--checkpoint", "--model-arg"),
        *("--device", "--dry-run", "--overwrite", "--survey", "--json"),
    },
    "train": {
        *("model", "--data", "--output", "--recipe", "--plan", "--option", "--keep", "--drop", "--teacher", "--set"),
        *("--resume", "--size", "--pretrained", "--model-arg", "--root", "--loader", "--workers", "--device", "--json"),
        *("--task", "--head", "--pyramid", "--logger"),
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
    "export": {
        *("model", "--to", "--output", "--size", "--dynamic", "--precision", "--data", "--calibrate", "--photographs"),
        *("--pretrained", "--model-arg", "--root", "--json"),
    },
    "push": {"folder", "repo", "--revision", "--private", "--bench", "--message", "--dry-run", "--json"},
    "predict": {"model", "images", "--output", "--threshold", "--size", "--device", "--json"},
    "compare": {
        *("what", "--output", "--mode", "--model", "--model-arg", "--backbone", "--plan", "--data", "--root"),
        *("--recipe", "--task"),
        *("--set", "--seeds", "--patch-size", "--size", "--teacher", "--engine", "--per-gpu", "--address", "--cpus"),
        *("--only", "--retry", "--dry-run", "--show", "--merge", "--pack", "--json"),
    },
    "report": {"stores", "--output", "--md", "--csv", "--json"},
    "serve": {"models", "--plan", "--size", "--port", "--host", "--pretrained", "--fetch", "--device", "--json"},
    "bench op": {
        *("--mechanism", "--option", "--preset", "--batch", "--heads", "--head-dim", "--tokens", "--bias", "--passes"),
        *("--compared", "--precision", "--device", "--budget", "--output", "--resume", "--from", "--plot", "--json"),
    },
    "bench model": {
        *("name", "--plan", "--option", "--keep", "--drop", "--model-arg", "--size", "--batch", "--passes"),
        *("--runtime", "--precision", "--device"),
        *("--budget", "--output", "--resume", "--from", "--json"),
    },
    "bench edge": {
        *("name", "--plan", "--option", "--keep", "--drop", "--model-arg", "--size", "--threads", "--runtime"),
        *("--files", "--budget", "--output", "--resume", "--from", "--plot", "--json"),
    },
    "bench auto": {
        *("names", "--size", "--plan", "--drop", "--batch", "--device", "--budget", "--output", "--resume", "--from"),
        "--json",
    },
    "bench training": {
        *("model", "--data", "--plan", "--recipe", "--set", "--steps", "--model-arg", "--root", "--loader"),
        *("--loaders", "--workers", "--device", "--output", "--resume", "--from", "--json"),
    },
    "bench scaling": {"--mechanism", "--tokens", "--json"},
    "show masks": {"run", "--output", "--json"},
    "show maps": {
        *("model", "images", "--plan", "--with", "--figure", "--at", "--token", "--pooled", "--layer", "--head"),
        *("--rollout", "--output", "--drop", "--size", "--checkpoint", "--pretrained", "--model-arg", "--device"),
        "--json",
    },
    "show features": {
        *("model", "images", "--plan", "--with", "--at", "--layer", "--output", "--drop", "--size", "--checkpoint"),
        *("--pretrained", "--model-arg", "--device", "--json"),
    },
    "show kernels": {"--output", "--head-dim", "--seed", "--json"},
    "show sensitivity": {
        *("model", "data", "--plan", "--keep", "--images", "--output", "--drop", "--size", "--checkpoint"),
        *("--pretrained", "--model-arg", "--device", "--json"),
    },
    "show pareto": {"stores", "--output", "--json"},
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
    """A plan is --plan, an image size --size and so on, on every verb, with no second name for any."""
    (command,) = (found for name, found in commands() if name == verb)
    options = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    # Those take plans beside each other, as stella,mixa:keep=6.
    several = ("plan", "bench auto", "show maps", "show features", "show sensitivity")
    runtime = {"--to"} if verb == "export" else set()  # there it names where the file goes
    second = {"--to", "--candidates", "--plans", "--input-size", "--resolution", "--resolutions", "--sizes"}
    second |= {"--modes", "--patch-sizes"}
    assert not options & (second - runtime)
    assert "--mode" not in options or verb == "compare"  # scratch or distil; eager, compiled or graph is a --runtime
    if {"--option", "--keep", "--drop"} & options and "--mechanism" not in options and verb not in several:
        assert {"--plan", "--option", "--keep", "--drop"} <= options


@every
def test_help_shows_an_example(linvit: Callable[..., Outcome], verb: str) -> None:
    outcome = linvit(*verb.split(), "--help")
    assert outcome.code == 0
    assert f"Example: linvit {verb}" in outcome.out and "\\b" not in outcome.out


@pytest.mark.parametrize("group", ["bench", "show"])
def test_a_group_lists_its_verbs_whole(linvit: Callable[..., Outcome], group: str) -> None:
    outcome = linvit(group, "--help")
    assert outcome.code == 0 and "..." not in outcome.out.partition("Commands:")[2] and "\\b" not in outcome.out
    (example,) = re.findall(r"Example: linvit (.*)", outcome.out)
    (command,) = (found for name, found in commands() if example.startswith(f"{name} "))
    command.make_context("linvit", shlex.split(example)[2:])


@every
def test_examples_of_the_help_parse(verb: str) -> None:
    (command,) = (found for name, found in commands() if name == verb)
    examples = re.findall(r"Example: linvit (.*)", command.help or "")
    assert examples
    for example in examples:
        words = shlex.split(example)
        assert words[: len(verb.split())] == verb.split()
        command.make_context(verb, words[len(verb.split()) :])  # raises for what it does not know


@every
def test_json_everywhere(linvit: Callable[..., Outcome], verb: str) -> None:
    assert "--json" in linvit(*verb.split(), "--help").out


def test_wrong_verb_and_option(linvit: Callable[..., Outcome]) -> None:
    outcome = linvit("lits")
    assert outcome.code == 2 and "Did you mean 'list'?" in outcome.err
    outcome = linvit("list", "--jsn")
    assert outcome.code == 2 and "--json" in outcome.err


CONVERT = "convert deit_tiny_patch16_224 --no-pretrained --dry-run --plan"


@pytest.mark.parametrize(
    "line, message",
    [
        (f"{CONVERT} mixa:keep=abc", "keep of plan mixa must be"),
        (f"{CONVERT} mixa --option keep=[[1]]", "keep of plan mixa must be"),
        (f"{CONVERT} performer:features=-1", "features of performer must be"),
        (f"{CONVERT} cosformer:variant=3", "variant of cosformer must be"),
        (f"{CONVERT} window:window=abc", "window of window must be"),
        (f"{CONVERT} castling --option kernel_size=-3", "kernel_size of castling must be"),
        (f"{CONVERT} castling:eps=abc", "eps of castling must be"),
        (f"{CONVERT} castling:eps=-1", "eps of castling must be"),
        (f"{CONVERT} stella --model-arg num_heads=0", "cannot be built with"),
        (f"{CONVERT} stella --model-arg img_size=[1]", "cannot be built with"),
        ("train vit_tiny_patch16_224 --data digits -o x --plan castling:eps=-1", "eps of castling must be"),
        ("compare digits -o x --dry-run --plan performer:features=-1", "features of performer must be"),
        ("bench op --mechanism stella --heads 0", "at least 1"),
        ("bench scaling --tokens -3", "Invalid value for '--tokens'"),
    ],
)
def test_a_wrong_value_is_one_line(
    linvit: Callable[..., Outcome], line: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = linvit(*line.split())
    assert outcome.code == 2 and message in outcome.err.splitlines()[-1] and not list(tmp_path.iterdir())


def test_an_empty_output_is_a_mistake(linvit: Callable[..., Outcome]) -> None:
    """Of every verb that writes: a shell variable that is not set must not write into the folder one is in."""
    writing = [(name, c) for name, c in commands() if any("--output" in p.opts for p in c.params)]
    assert len(writing) > 5
    for name, command in writing:
        needed = ["x" for p in command.params if p.required and p.param_type_name == "argument"]
        outcome = linvit(*name.split(), *needed, "-o", "")
        assert outcome.code == 2 and "an empty path names no place" in outcome.err, name


QUICK = """
import sys
from linvit_command import main
sys.argv[0] = "linvit"
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print("\\nheavy:", *sorted({"torch", "timm", "linvit"} & sys.modules.keys()))
"""


def quickly(*args: str, **environment: str) -> tuple[str, str]:
    """What the installed command prints, and what of torch, timm and linvit it imported for it."""
    command = [sys.executable, "-c", QUICK, *args]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **environment})
    printed, _, heavy = done.stdout.rpartition("\nheavy:")
    return printed, heavy.strip()


def test_help_version_and_verbs_import_nothing_heavy(linvit: Callable[..., Outcome]) -> None:
    """`import linvit` takes seconds. The help is the one that the verbs themselves give."""
    from linvit import __version__

    assert quickly("--version") == (f"linvit {__version__}\n", "")
    shown, heavy = quickly("--help")
    assert shown.splitlines()[1:] == linvit("--help").out.splitlines()[1:] and not heavy
    assert "..." not in shown.partition("Commands:")[2]
    words = {"COMP_WORDS": "linvit co", "COMP_CWORD": "1", "_LINVIT_COMPLETE": "complete_bash"}
    assert quickly(**words) == ("convert\ncompare\n", "")


def test_the_shell_completes_options_of_a_verb() -> None:
    words = {"COMP_WORDS": "linvit convert --pl", "COMP_CWORD": "2", "_LINVIT_COMPLETE": "complete_bash"}
    assert quickly(**words)[0] == "--plan\n--plot\n"


def test_the_installed_command_runs_a_verb() -> None:
    shown, heavy = quickly("list", "plans", "--json")
    assert "mixa" in shown and heavy == "linvit timm torch"
