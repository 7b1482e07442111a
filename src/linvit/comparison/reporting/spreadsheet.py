"""The report as CSV: a line for each run, and one for each point of a speed ladder."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from linvit.codec import to_plain
from linvit.comparison.reporting.answer import Contents
from linvit.comparison.results import Run

COLUMNS = (
    *("kind", "setting", "mode", "data", "candidate", "mechanism", "paper", "patch", "size", "tokens", "seed", "key"),
    *("top1", "top5", "best", "standard_error", "loss", "parameters", "macs"),
    *("training_seconds", "training_images_per_second", "training_peak_bytes", "training_shared"),
    *("zero_shot", "teacher_top1", "agreement", "kl", "float16_rms", "bfloat16_rms"),
    *("device", "hardware", "pass", "batch", "precision", "compiled", "cuda_graph", "median_ms", "low_ms", "high_ms"),
    *("images_per_second", "peak_bytes", "ratio_to_softmax", "note", "commit", "command"),
)


def spreadsheet(contents: Contents) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for line in [*runs(contents), *speeds(contents)]:
        writer.writerow({name: harmless(value) for name, value in line.items()})
    return text.getvalue()


def runs(contents: Contents) -> Iterator[dict[str, Any]]:
    for setting in contents.settings:
        for row in setting.rows:
            for run in row.runs:
                yield {"kind": "teacher" if row.is_teacher else "run", "setting": setting.title, **run_line(run)}


def run_line(run: Run) -> dict[str, Any]:
    training = to_plain(run.training)
    conversion = to_plain(run.conversion) if run.conversion else {}
    return {
        **to_plain(run.label),
        **to_plain(run.accuracy),
        **to_plain(run.model),
        **conversion,
        **{f"training_{name}": value for name, value in training.items()},
        **{f"{drift.dtype}_rms": drift.relative_rms for drift in run.drift},
        "key": run.key,
        "data": run.data.name,
        "device": run.training.device,
        "hardware": run.environment.hardware,
        "commit": run.environment.commit,
        "command": run.command,
    }


def speeds(contents: Contents) -> Iterator[dict[str, Any]]:
    """Every timing once, though rows of two settings may share it."""
    for speed in contents.results.speeds:
        for point in speed.rows:
            times = to_plain(point.milliseconds) if point.milliseconds else {}
            yield {
                "kind": "speed",
                **{name: getattr(speed.label, name) for name in ("candidate", "mechanism", "paper", "patch")},
                **to_plain(point),
                **{f"{name}_ms": value for name, value in times.items()},
                "hardware": speed.chip(point),
                "ratio_to_softmax": point.ratio,
                "key": speed.key,
                "command": speed.command,
            }


def harmless(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value
