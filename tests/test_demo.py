"""The demo on a small scale: all of it, with fewer candidates, epochs and pixels; `make demo` runs it in full."""

from __future__ import annotations

import io
import re
import subprocess
import sys
import webbrowser
from pathlib import Path

import pytest
import torch
from rich.console import Console
from scripts.demo import __main__ as demo
from scripts.demo import comparing, photograph
from scripts.demo.screen import PARTS, Screen
from sklearn.datasets import load_sample_image

from linvit.comparison.description.request import read_request
from linvit.comparison.description.spec import load, preset_text
from linvit.comparison.scheduling.store import Store

ROOT = Path(__file__).parent.parent
CANDIDATES = ["softmax", "mixa:keep=1", "castling"]


@pytest.fixture
def screen() -> Screen:
    return Screen(Console(file=io.StringIO(), width=200))


def said(screen: Screen) -> str:
    file = screen.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The demo's preset cut down to a file of its own, in a folder of its own; a browser would be an error."""
    text = preset_text("digits-distil").replace('"epochs=5"', '"epochs=1"').replace('"epochs=15"', '"epochs=1"')
    text = text.replace("warmup_epochs=2", "warmup_epochs=0").replace("size = [32, 128, 256]", "size = [32]")
    text = text.replace("depths = [1, 2, 1]\nheads = [1, 2, 4]", "depths = [1, 1]\nheads = [1, 2]")
    text = re.sub(r"plans = \[.*\]", f"plans = {CANDIDATES}", text).replace("width = 32", "width = 8")
    path = tmp_path / "small.toml"
    path.write_text(text.replace("'", '"').replace("seeds = [0]", "seeds = [0]\npatch_size = [8]"), encoding="utf-8")
    for name, value in {"SIZES": {32: 1, 64: 2}, "ROUNDS": 2, "SECONDS": 0.01}.items():
        monkeypatch.setattr(photograph, name, value)
    monkeypatch.setattr(comparing, "WORKERS", 1)
    monkeypatch.setattr(sys, "argv", ["demo"])
    monkeypatch.setattr(webbrowser, "open", lambda url: pytest.fail(f"{url} was opened"))
    monkeypatch.setenv("CI", "1")
    monkeypatch.chdir(tmp_path)
    return path


def test_whole_demo_and_once_more(small: Path, screen: Screen, capsys: pytest.CaptureFixture[str]) -> None:
    folder, threads = small.parent / "demo", torch.get_num_threads()
    try:
        assert demo.demo(screen, folder, small.name) == 0
    finally:
        torch.set_num_threads(threads)
    assert {path.name for path in folder.iterdir()} == {"store", "report.html", "photograph.png", "photograph.json"}
    assert (folder / "photograph.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert all(name in page for name in CANDIDATES)

    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.split()[:1] and "%" in line}
    assert rows.keys() >= set(CANDIDATES) and "1,437 images to learn from, 360 to check; one seed" in out
    for run in (result for result in Store(folder / "store").results() if result.kind == "run"):
        name = run.label.candidate
        assert rows[name][1:4:2] == [f"{run.conversion.zero_shot:.1f}", f"{run.score:.1f}"]
        assert re.search(r"\d\.\d\d×", " ".join(rows[name])), "its speed against softmax is not there"
        assert run.environment.command == "linvit compare small.toml -o demo/store --per-gpu 1"
    assert rows["softmax"][5] == "–" and all("±" in " ".join(rows[name]) for name in CANDIDATES[1:])
    assert str(folder / "report.html") in out and str(folder / "photograph.png") in out

    lines = said(screen)
    assert "$ linvit compare small.toml -o demo/store --per-gpu 1" in lines
    assert "$ linvit report demo/store -o demo/report.html" in lines
    assert all(re.search(rf"  {name} +[\d.]+ % right after conversion", lines) for name in CANDIDATES)
    goes_on_then_begins_afresh(small, folder / "store", screen)


def goes_on_then_begins_afresh(small: Path, folder: Path, screen: Screen) -> None:
    request, store = read_request(str(small), {}), Store(folder)
    lost = next(job for job in request.jobs if job.kind == "run")
    kept = store.path(request.jobs[0]).stat().st_mtime_ns
    store.path(lost).unlink()
    assert comparing.compare(str(small), folder, screen)
    assert "Going on with a demo that was stopped: 6 of 7 jobs are done." in said(screen)
    assert store.finished(lost) and store.path(request.jobs[0]).stat().st_mtime_ns == kept
    comparing.open_store(folder, request, screen)
    assert "Beginning afresh" in said(screen) and not folder.exists()


def test_a_failed_candidate_is_said_and_the_rest_shown(
    small: Path, screen: Screen, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from linvit.comparison.scheduling.execution import running

    whole = running.train_on

    def broken(bench: object, *rest: object) -> object:
        if "qt" in str(bench.report):  # type: ignore[attr-defined]
            raise RuntimeError("broken on purpose")
        return whole(bench, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(running, "train_on", broken)
    text = small.read_text(encoding="utf-8").replace(", ".join(f'"{n}"' for n in CANDIDATES), '"softmax", "qt"')
    small.write_text(text, encoding="utf-8")
    assert not comparing.compare(small.name, small.parent / "store", screen)
    assert re.search(r"  qt +failed: RuntimeError: broken on purpose", said(screen))
    comparing.show(comparing.report(small.parent / "store", small.parent / "report.html", screen))
    assert "softmax" in capsys.readouterr().out


def test_the_preset_is_what_the_demo_promises() -> None:
    comparison = load("digits-distil")
    names = [name.partition(":")[0] for name in comparison.plans]
    assert {"softmax", "mixa", "castling", "qt", "mobile"} < set(names) and len(names) == 9
    assert (comparison.mode, comparison.recipe, comparison.data) == ("distil", "fast", "digits")


def test_bar_comes_before_torch() -> None:
    code = "import sys, scripts.demo.__main__; sys.exit('torch' in sys.modules or 'linvit' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_bar_moves_through_all_parts(screen: Screen) -> None:
    places = []
    for part in PARTS:
        for share in (0.0, 0.5, 1.0):
            screen.at(part, share, "a text that is much too long for the place it has beside the bar")
            places.append(screen.progress.tasks[0].completed)
    assert places == sorted(places) and places[0] == 0 and places[-1] == screen.progress.tasks[0].total
    assert screen.progress.tasks[0].description.endswith("…")


@pytest.mark.parametrize(
    ("environment", "platform", "expected"),
    [
        ({}, "linux", False),
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({"DISPLAY": ":0", "CI": "true"}, "linux", False),
        ({"DISPLAY": "localhost:10.0", "SSH_CONNECTION": "a b c d"}, "linux", False),
        ({}, "darwin", True),
        ({"CI": "1"}, "darwin", False),
    ],
)
def test_browser_opens_on_a_desktop_alone(environment: dict[str, str], platform: str, expected: bool) -> None:
    assert demo.desktop(environment, platform) is expected


def test_photograph_is_cropped_and_normalised() -> None:
    image = photograph.prepare(load_sample_image("china.jpg"), 64)
    assert image.shape == (1, 3, 64, 64) and image.dtype == torch.float32
    assert -3 < image.min() < 0 < image.max() < 3


def test_photograph_ladder(small: Path, screen: Screen, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        rows = photograph.measure(screen)
    finally:
        torch.set_num_threads(threads)
    assert [(row.size, row.model, row.tokens) for row in rows] == [
        (size, model, (size // 16) ** 2 + 1) for size in (32, 64) for model in ("softmax", "mixa", "stella")
    ]
    assert all(row.ratio == 1 for row in rows if row.model == "softmax") and all(row.time.repeats >= 2 for row in rows)
    assert "plan stella: 12 of 12 layers changed" in said(screen)
    photograph.show(rows)
    assert "about time, not about accuracy" in " ".join(capsys.readouterr().out.split())


def test_a_model_that_computes_wrongly_is_not_timed() -> None:
    models = photograph.build(Screen(Console(file=io.StringIO())))
    models["stella"].register_forward_hook(lambda module, args, out: out + (out.dtype == torch.float32))
    with pytest.raises(photograph.LinvitError, match="stella is off"):
        photograph.check(models, torch.rand(1, 3, 32, 32))
