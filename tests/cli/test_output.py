"""The progress bar keeps quiet for two seconds, and always when nobody watches."""

from __future__ import annotations

import time

import pytest

from linvit.cli import output


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


def test_an_error_inside_stops_the_bar(terminal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "PATIENCE", 0.05)
    with pytest.raises(ZeroDivisionError), output.progress("measuring", 1):
        time.sleep(0.2)
        1 / 0  # noqa: B018


def test_json_refuses_what_no_reader_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError):
        output.print_json({"x": float("nan")})
