"""What `linvit compare` prints: the grid before, the progress meanwhile, and what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TextIO

from linvit.cli.output import console, print_json, say, styled, table
from linvit.cli.train import PATIENCE
from linvit.codec import to_plain

if TYPE_CHECKING:
    from rich.progress import Progress

    from linvit.comparison.description.job import Job
    from linvit.comparison.description.request import Request
    from linvit.comparison.results import SpeedPoint
    from linvit.comparison.scheduling.estimate import GridRow
    from linvit.comparison.scheduling.scheduler import Summary, Watch
    from linvit.comparison.scheduling.store import Store
    from linvit.comparison.statistics.rows import CandidateRow, Setting
    from linvit.comparison.statistics.speeds import Ladder

    TimedRow = tuple[CandidateRow, SpeedPoint | None, Ladder | None]


def print_grid(jobs: Sequence[Job], request: Request, store: Store | None, as_json: bool) -> None:
    """The candidates, their runs and about how long they take."""
    import torch

    from linvit.comparison.scheduling.estimate import estimate

    device = "cuda" if torch.cuda.is_available() else "cpu"
    guess = estimate(jobs, store, request.data, device)
    timings = [(t, store is not None and store.finished(t)) for t in jobs if t.kind == "speed"]
    runs, left = sum(len(row.jobs) for row in guess.rows), sum(len(row.left) for row in guess.rows)
    if as_json:
        rows = []
        for row in guess.rows:
            label = {name: getattr(row.jobs[0].label, name) for name in ("candidate", "mode", "patch", "size")}
            keys = [{"key": t.key, "seed": t.label.seed, "finished": t not in row.left} for t in row.jobs]
            rows.append({"kind": row.jobs[0].kind, **label, **vars(row.model), "seconds": row.seconds, "runs": keys})
        timed = [{"key": t.key, "candidate": t.label.candidate, "finished": finished} for t, finished in timings]
        told = {"timings": timed, "seconds": guess.seconds, "estimated": guess.how}
        left_out = [vars(row) for row in request.left_out]
        print_json({"rows": rows, "runs": runs, "left": left, **told, "left_out": left_out})
        return
    columns = {"candidate": 14, "patch": -5, "size": -5, "seeds": 5, "params M": -8, "MACs M": -7, "tokens": -6}
    out = console()
    out.print(table(map(grid_cells, guess.rows), **columns, left=-4, time=-4))
    waiting = sum(not finished for _, finished in timings)
    out.print(f"{runs} runs, {left} of them left; {waiting} of {len(timings)} candidates to time, up to a minute each.")
    about = "" if guess.seconds is None else f"About {duration(guess.seconds)} on one device, "
    out.print(f"{about or guess.how[0].upper()}{guess.how[0 if about else 1 :]}.")
    print_left_out(request, sys.stdout)


def print_left_out(request: Request, file: TextIO) -> None:
    for other in request.left_out:
        print(f"left out: {other.candidate} at patch {other.patch}, size {other.size}: {other.reason}", file=file)


def grid_cells(row: GridRow) -> list[object]:
    label, model = row.jobs[0].label, row.model
    name = f"{label.candidate} (teacher)" if row.jobs[0].kind == "teacher" else label.candidate
    seeds = ",".join(dict.fromkeys(str(job.label.seed) for job in row.jobs))  # of several budgets once
    counts = [f"{model.parameters / 1e6:.2f}", f"{model.macs / 1e6:,.0f}", model.tokens or "–"]
    spent = "–" if row.seconds is None else duration(row.seconds)
    return [name, label.patch or "–", label.size, seeds, *counts, len(row.left), spent]


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"


def bars(jobs: Sequence[Job], store: Store, shown: Progress) -> Watch:
    finished = {job.key for job in jobs if store.finished(job)}
    running: dict[str, Any] = {}
    whole = shown.add_task("all jobs", total=len(jobs), completed=len(finished), text="")

    def watch(job: Job, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind in ("done", "failed", "lost"):
            if job.key in running:
                shown.remove_task(running.pop(job.key))
            finished.update([job.key] if kind == "done" else [])
            shown.console.print(styled(ended(job, record, store)))
        elif job.key not in running:
            running[job.key] = shown.add_task(name(job), total=None, text="")
        if kind == "train":
            shown.update(running[job.key], total=record["steps"], completed=record["step"])
        elif kind == "eval":
            shown.update(running[job.key], text=f"epoch {record['epoch']:.0f}  {scored(record)}")
        elif kind == "note":
            shown.console.print(styled(f"{name(job)}: {record['text']}"))
        parts = [shown.tasks[shown.task_ids.index(bar)] for bar in running.values()]
        so_far = sum(part.completed / part.total for part in parts if part.total)
        shown.update(whole, completed=len(finished) + so_far, text=f"{len(finished)} of {len(jobs)}")

    return watch


def lines(jobs: Sequence[Job], store: Store) -> Watch:
    """For a log file: the end of every job, and each run's progress now and then."""
    finished = {job.key for job in jobs if store.finished(job)}
    last: dict[str, float] = {}

    def watch(job: Job, record: dict[str, Any]) -> None:
        kind, text = record["kind"], ""
        if kind in ("done", "failed", "lost"):
            finished.update([job.key] if kind == "done" else [])
            text = f"[{len(finished)}/{len(jobs)}] {ended(job, record, store)}"
        elif kind == "note":
            text = f"{name(job)}: {record['text']}"
        elif kind == "eval" and time.monotonic() - last.get(job.key, 0) > PATIENCE:
            last[job.key] = time.monotonic()
            text = f"{name(job)}: epoch {record['epoch']:.0f}, {scored(record)}"
        if text:
            say(text, err=True)

    return watch


def scored(record: dict[str, Any]) -> str:
    """What an evaluation found. The metrics of detectors and segmenters are fractions there."""
    if "top1" in record:
        return f"top-1 {record['top1']:.2f}"
    if "cosine" in record:
        by_labels = f"kNN {record['knn']:.2f}, " if "knn" in record else ""
        return f"{by_labels}cosine {record['cosine']:.4f}"
    metric = "mAP" if "mAP" in record else "mIoU"
    return f"{metric} {100 * record[metric]:.2f}"


def ended(job: Job, record: dict[str, Any], store: Store) -> str:
    from linvit.comparison.reporting.wording import metric_name
    from linvit.comparison.results import Run

    if record["kind"] != "done":
        return f"{name(job)}: {record['kind']}: {record.get('error') or record.get('text')}"
    found = store.result(job)
    score = f"{metric_name(found.accuracy.metric)} {found.score:.2f}" if isinstance(found, Run) else "timed"
    return f"{name(job)}: {score}, {duration(found.seconds if found else 0)}"


def name(job: Job) -> str:
    label = job.label
    patch = f" patch {label.patch}" if label.patch else ""
    seed = f" seed {label.seed}" if job.kind != "speed" else " speed"
    return f"{label.candidate}{' (teacher)' if job.kind == 'teacher' else ''}{patch} {label.size} px{seed}"


def print_summary(jobs: Sequence[Job], store: Store, summary: Summary, as_json: bool) -> None:
    """What came of the jobs, and what they found."""
    from linvit.comparison import PAGE, report

    page = store.folder / PAGE
    found = report(store.folder, page).settings if summary.anything else ()
    keys = list(dict.fromkeys(job.candidate_key for job in jobs))
    by_key = {job.key: job for job in jobs}
    errors = {key: store.failures(key)[-1].error for key in summary.failed}
    if as_json:
        failed = [{"key": key, "label": to_plain(by_key[key].label), "error": error} for key, error in errors.items()]
        counts = {"done": summary.done, "earlier": summary.earlier, "missing": summary.missing, "failed": failed}
        where = {"store": str(store.folder), "report": str(page) if found else None}
        rows = [row for setting in found for row in json_rows(setting, keys)]
        print_json({**where, **counts, "rows": rows, "notes": store.notes})
        return
    for setting in found:
        print_setting(setting, keys)
    for key, error in errors.items():
        say(f"failed: {name(by_key[key])}: {error}")
    for note in store.notes:
        say(note)
    if not summary.complete:
        lacking = f"{len(summary.failed)} of {len(jobs)} jobs failed"
        lacking += f", {len(summary.missing)} are missing" if summary.missing else ""
        say(f"{lacking}: linvit compare -o {store.folder} --retry tries them again.")
    ended = len({*summary.done, *summary.earlier})
    files = f"{ended} result file{'s' if ended != 1 else ''}"
    say(f"{files} in {store.folder}. Report: {page if found else 'none yet'}")


def timed_rows(setting: Setting, keys: Sequence[str] = ()) -> list[TimedRow]:
    """The rows of a setting, or of these candidates in their order, each with its time at its own size."""
    from linvit.comparison.reporting.answer import at_own_size, clock_of

    order = {key: place for place, key in enumerate(keys or [row.first.candidate_key for row in setting.rows])}
    rows = [row for row in setting.rows if row.first.candidate_key in order]
    rows.sort(key=lambda row: order[row.first.candidate_key])
    clock = clock_of(rows, many=False)
    return [(row, at_own_size(row, clock), clock) for row in rows]


def print_setting(setting: Setting, keys: Sequence[str]) -> None:
    rows = timed_rows(setting, keys)
    if not rows:
        return
    from linvit.comparison.reporting.wording import metric_name

    out, score = console(), metric_name(setting.metric)
    to = f"to {'teacher' if setting.of_features else 'softmax'}"
    columns = {"candidate": 14, "patch": -5, score: -12, to: -14, "params M": -8, "MACs M": -7, "ms": -7}
    out.print(styled((setting.title, "bold")))
    out.print(table((result_cells(row, timing) for row, timing, _ in rows), **columns))
    paired = "seeds and images" if rows[0][0].first.accuracy.correct else "seeds"
    notes = ["± is the 95 % interval over seeds", f"“{to}” is paired over {paired}"]
    parts = {row.first.model.counted for row, _, _ in rows} - {None}
    notes += [f"MACs are of the {part}" for part in parts]
    first, _, clock = rows[0]
    beside = any(timing.shared for _, timing, _ in rows if timing is not None)
    how = "some while others trained here: they say little" if beside else "timed alone"
    notes += [f"ms is one image of {first.label.size} px on {clock.chip}, {how}"] if clock else []
    out.print("; ".join(notes) + ".", style="italic")


def result_cells(row: CandidateRow, timing: SpeedPoint | None) -> list[object]:
    def spread(interval: tuple[float, float] | None) -> str:
        return f" ±{(interval[1] - interval[0]) / 2:.2f}" if interval else ""

    score = f"{row.score.mean:.2f}{spread(row.score.interval)}"
    delta = "–" if row.delta is None else f"{row.delta.mean:+.2f}{spread(row.delta.interval)}"
    model, latency = row.first.model, None if timing is None else timing.median
    counts = [f"{model.parameters / 1e6:.2f}", f"{model.macs / 1e6:,.0f}", "–" if latency is None else f"{latency:.2f}"]
    name = f"{row.label.candidate} (teacher)" if row.is_teacher else row.label.candidate  # as one types it
    return [name, row.patch or "–", score, delta, *counts]


def json_rows(setting: Setting, keys: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The same for machines; `interval` is over images where there is a single seed."""
    told = []
    for row, timing, _ in timed_rows(setting, keys):
        label = {name: getattr(row.label, name) for name in ("candidate", "mode", "patch", "size")}
        found: dict[str, Any] = {row.metric: row.score.mean, f"{row.metric}_interval": row.score.interval}
        found |= {"interval": row.interval, **row.metrics}
        found |= {f"{name}_difference": delta.mean for name, delta in row.deltas.items()}
        found |= {f"{name}_difference_interval": delta.interval for name, delta in row.deltas.items()}
        found |= {"difference": row.delta and row.delta.mean, "difference_interval": row.delta and row.delta.interval}
        counts = {name: getattr(row.first.model, name) for name in ("parameters", "macs", "tokens")}
        against, kind = row.against if row.delta else None, "teacher" if row.is_teacher else "run"
        row_told = {"kind": kind, **label, "seeds": row.seeds, **found, "against": against, **counts}
        told.append({**row_told, "milliseconds": timing and timing.median})
    return told
