"""The progress bar keeps quiet for two seconds, and always when nobody watches; any text goes to any stream."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from linvit.cli import main, output
from tests.cli.conftest import Outcome
from tests.cli.training import MODEL, SMALL, folder_of


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")


def work(seconds: float) -> None:
    with output.progress("measuring", 2) as advance:
        for _ in range(2):
            time.sleep(seconds / 2)
            advance()


def test_bar_appears_when_it_takes_long(
    terminal: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert output.PATIENCE == 2
    monkeypatch.setattr(output, "PATIENCE", 0.05)
    work(0.6)
    captured = capsys.readouterr()
    assert "measuring" in captured.err and "/2" in captured.err and captured.out == ""


def test_no_bar_for_quick_work(terminal: None, capsys: pytest.CaptureFixture[str]) -> None:
    work(0.1)
    assert "measuring" not in capsys.readouterr().err


def test_no_bar_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.setattr(output, "PATIENCE", 0.05)
    work(0.3)
    assert capsys.readouterr().err == ""


def test_the_bar_is_seen_through_what_redirects_streams(
    terminal: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "PATIENCE", 0.05)
    streams, nowhere = (sys.stdout, sys.stderr), io.StringIO()
    with output.progress("exporting", 1), redirect_stdout(nowhere), redirect_stderr(nowhere):
        time.sleep(0.3)
    assert "exporting" in capsys.readouterr().err and (sys.stdout, sys.stderr) == streams


def test_an_error_inside_stops_the_bar(terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PATIENCE", 0.05)
    with pytest.raises(ZeroDivisionError), output.progress("measuring", 1):
        time.sleep(0.2)
        1 / 0  # noqa: B018


def test_json_refuses_what_no_reader_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError):
        output.print_json({"x": float("nan")})


ODD = "a[red]"


def test_names_are_printed_as_they_are(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    """`[…]` is no markup, in paths and in names of classes."""
    photos = folder_of(tmp_path / "p[/x]", train={ODD: 4, "b": 4}, val={ODD: 2, "b": 2})
    run = tmp_path / "run[/b]"
    trained = linvit("train", *MODEL, f"--data={photos}", *SMALL, "-o", str(run))
    assert trained.code == 0, trained.err
    assert f"Models: {run / 'best'}, {run / 'last'}" in trained.out
    evaluated = linvit("eval", str(run / "best"), f"--data={photos}", "--device=cpu", "--per-class")
    assert evaluated.code == 0 and ODD in evaluated.out
    photo = photos / "val" / ODD / "0.png"
    predicted = linvit("predict", str(run / "best"), str(photo), "--device=cpu")
    assert predicted.code == 0 and str(photo) in predicted.out and predicted.out.count(ODD) == 2
    converted = linvit("convert", str(run / "best"), "--plan=stella", "-o", str(tmp_path / "c[/b]"))
    assert converted.code == 0 and f"Saved to {tmp_path / 'c[/b]'}" in converted.out.replace("\n", "")


def test_escape_codes_have_no_effect(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    outcome = linvit("train", *MODEL, f"--data={tmp_path}/\x1b[2Jnone", "-o", str(tmp_path / "run"))
    assert outcome.code == 2 and "\x1b" not in outcome.err and "\\x1b[2Jnone" in outcome.err
    made = output.table([("\x1b[31mred", output.styled(("\x07bell", "bold")))], a=0, b=0)
    shown = output.console()
    shown.file = io.StringIO()
    shown.print(made)
    assert "\\x1b[31mred" in shown.file.getvalue() and "\\x07bell" in shown.file.getvalue()


def list_to(monkeypatch: pytest.MonkeyPatch, stream: Any) -> int:
    """What `linvit list` exits with when stdout is this stream."""
    monkeypatch.setattr(sys, "stdout", stream)
    with pytest.raises(SystemExit) as stop:
        main(["list", "plans"])
    return int(stop.value.code or 0)


def test_a_stdout_that_knows_ascii_only(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii")
    assert list_to(monkeypatch, stream) == 0
    stream.flush()
    assert b"mixa" in buffer.getvalue()
    output.say("5 × 5 caf\udce9")
    stream.flush()
    assert buffer.getvalue().endswith(b"5 \\xd7 5 caf\\udce9\n")


def test_a_closed_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_to(monkeypatch, None) == 0


SWIN = "convert swin_tiny_patch4_window7_224 --no-pretrained --dry-run --plan qt"


@pytest.mark.parametrize("line", ["list", "list plans", "list settings fast", SWIN])
def test_a_narrow_terminal_loses_nothing(
    linvit: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    """Words break where they must; none is cut off."""
    shown = []
    for width in (100, 80, 70):
        monkeypatch.setattr(output, "WIDTH", width)
        printed = linvit(*line.split()).out
        assert max(map(len, printed.splitlines())) <= width
        shown.append(Counter(printed.replace(" ", "").replace("\n", "").replace("─", "")))
    assert shown[0] == shown[1] == shown[2]


def test_a_reader_that_has_enough(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        assert list_to(monkeypatch, stream) in (0, 1)
        stream.flush()
    assert "Traceback" not in capsys.readouterr().err


def test_a_full_disk_behind_stdout(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    stream = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    assert list_to(monkeypatch, stream) == 2
    assert capsys.readouterr().err == "error: cannot write: No space left on device\n"


SLOW = """
import sys, time
class Slow:  # an import that takes its time, told to whoever waits for it
    def find_spec(self, name, *_):
        if name in ("typer", "torch") and sys.argv[1] == name:
            print(name, flush=True)
            time.sleep(30)
sys.meta_path.insert(0, Slow())
import linvit_command
linvit_command.main(["list"])
"""


@pytest.mark.parametrize("name", ["typer", "torch"])
def test_ctrl_c_while_things_are_imported(name: str) -> None:
    """Without a traceback, and with the shell's code for it."""
    interrupted([sys.executable, "-c", SLOW, name], name)


def test_ctrl_c_while_python_m_linvit_imports(tmp_path: Path) -> None:
    """Python imports the package before its command has a say."""
    (tmp_path / "torch.py").write_text("import time\nprint('torch', flush=True)\ntime.sleep(30)\n")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    interrupted([sys.executable, "-m", "linvit", "list"], "torch", env={**os.environ, "PYTHONPATH": path})


def interrupted(command: list[str], importing: str, **how: Any) -> None:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **how)
    assert process.stdout is not None and process.stdout.readline() == f"{importing}\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == output.INTERRUPTED and not err
