"""The report as CSV: a line for each run, and one for each point of a speed ladder."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from linvit.comparison.report.contents import Contents
from linvit.comparison.report.reading import Run

COLUMNS = (
    *("kind", "setting", "mode", "data", "candidate", "mechanism", "paper", "patch", "size", "tokens", "seed", "key"),
    *("top1", "top5", "best", "standard_error", "loss", "parameters", "macs"),
    *("training_seconds", "training_images_per_second", "training_peak_bytes", "training_shared"),
    *("zero_shot", "teacher_top1", "agreement", "kl", "float16_rms", "bfloat16_rms"),
    *("device", "hardware", "pass", "batch", "precision", "compiled", "cuda_graph", "median_ms", "low_ms", "high_ms"),
    *("images_per_second", "peak_bytes", "ratio_to_softmax", "note", "commit", "command"),
)
RUN = ("mode", "candidate", "mechanism", "paper", "patch", "size", "seed", "key")
TRAINING = ("seconds", "images_per_second", "peak_bytes", "shared")
TIMING = (
    *("size", "tokens", "batch", "precision", "compiled", "cuda_graph", "device", "hardware", "note"),
    *("images_per_second", "peak_bytes"),
)


def spreadsheet(contents: Contents) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
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
    drift = {d.get("dtype"): d.get("relative_rms") for d in run.get("drift") or ()}
    return {
        **{name: getattr(run, name) for name in RUN},
        **{name: run.number("accuracy", name) for name in ("top1", "top5", "best", "standard_error", "loss")},
        **{f"training_{name}": run.number("training", name) for name in TRAINING},
        **{name: run.number("conversion", name) for name in ("zero_shot", "teacher_top1", "agreement", "kl")},
        **{name: run.number("model", name) for name in ("parameters", "macs", "tokens")},
        "float16_rms": drift.get("float16"),
        "bfloat16_rms": drift.get("bfloat16"),
        "data": run.get("data", "name"),
        "device": run.get("training", "device"),
        "hardware": run.get("environment", "hardware"),
        "commit": run.get("environment", "commit"),
        "command": run.get("command"),
    }


def speeds(contents: Contents) -> Iterator[dict[str, Any]]:
    """Every timing once, though rows of two settings may share it."""
    files = {str(data["candidate_key"]): data for data in contents.results.speeds}
    for timing in contents.results.timings:
        data = files[timing.candidate_key]
        yield {
            "kind": "speed",
            **{name: data["label"].get(name) for name in ("candidate", "mechanism", "paper", "patch")},
            **{name: getattr(timing, name) for name in TIMING},
            **{f"{name}_ms": getattr(timing, name) for name in ("median", "low", "high")},
            "pass": timing.what,
            "ratio_to_softmax": timing.ratio,
            "key": data["key"],
            "command": data.get("command"),
        }


def harmless(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value
