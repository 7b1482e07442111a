"""What `linvit compare` prints: the grid before, the progress meanwhile, and what came of it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from linvit.cli.output import console, print_json, table
from linvit.codec import to_plain

if TYPE_CHECKING:
    from linvit.comparison.description.request import Request
    from linvit.comparison.description.task import Task
    from linvit.comparison.results import SpeedPoint
    from linvit.comparison.scheduling.estimate import GridRow, Guess
    from linvit.comparison.scheduling.scheduler import Summary, Watch
    from linvit.comparison.scheduling.store import Store
    from linvit.comparison.statistics.rows import CandidateRow, Setting

PATIENCE = 10.0  # seconds between two lines of one run, where there is no terminal


def print_grid(tasks: Sequence[Task], request: Request, store: Store | None, as_json: bool) -> None:
    """The candidates, their runs and about how long they take."""
    import torch

    from linvit.comparison.scheduling.estimate import estimate

    device = "cuda" if torch.cuda.is_available() else "cpu"
    guess = estimate(tasks, store, request.data, device)
    timings = [(t, store is not None and store.finished(t)) for t in tasks if t.kind == "speed"]
    if as_json:
        print_json(grid_json(guess, timings, request))
        return
    made = table(candidate=14, patch=-5, size=-5, seeds=5, **{"params M": -8, "MACs M": -7, "tokens": -6})
    for heading in ("left", "time"):
        made.add_column(heading, justify="right")
    for row in guess.rows:
        made.add_row(*grid_cells(row))
    out = console()
    out.print(made)
    runs, left = sum(len(row.tasks) for row in guess.rows), sum(len(row.left) for row in guess.rows)
    waiting = sum(not finished for _, finished in timings)
    out.print(f"{runs} runs, {left} of them left; {waiting} of {len(timings)} candidates to time, up to a minute each.")
    if guess.seconds is None:
        out.print(guess.how[0].upper() + guess.how[1:] + ".")
    else:
        out.print(f"About {duration(guess.seconds)} on one device, {guess.how}.")
    print_left_out(request, sys.stdout)


def print_left_out(request: Request, file: TextIO) -> None:
    for other in request.left_out:
        print(f"left out: {other.candidate} at patch {other.patch}, size {other.size}: {other.reason}", file=file)


def grid_cells(row: GridRow) -> list[str]:
    first, model = row.tasks[0], row.model
    label = first.label
    name = f"{label.candidate} (teacher)" if first.kind == "teacher" else label.candidate
    seeds = ",".join(dict.fromkeys(str(task.label.seed) for task in row.tasks))  # of several budgets once
    counts = [f"{model.parameters / 1e6:.2f}", f"{model.macs / 1e6:,.0f}", str(model.tokens or "–")]
    spent = "–" if row.seconds is None else duration(row.seconds)
    return [name, str(label.patch or "–"), str(label.size), seeds, *counts, str(len(row.left)), spent]


def grid_json(guess: Guess, timings: Sequence[tuple[Task, bool]], request: Request) -> dict[str, Any]:
    rows = [
        {
            "kind": row.tasks[0].kind,
            **{name: getattr(row.tasks[0].label, name) for name in ("candidate", "mode", "patch", "size")},
            **vars(row.model),
            "seconds": row.seconds,
            "runs": [{"key": t.key, "seed": t.label.seed, "finished": t not in row.left} for t in row.tasks],
        }
        for row in guess.rows
    ]
    return {
        "rows": rows,
        "runs": sum(len(row.tasks) for row in guess.rows),
        "left": sum(len(row.left) for row in guess.rows),
        "timings": [{"key": t.key, "candidate": t.label.candidate, "finished": f} for t, f in timings],
        "seconds": guess.seconds,
        "estimated": guess.how,
        "left_out": [vars(row) for row in request.left_out],
    }


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:,.1f} h"


@contextmanager
def screen(tasks: Sequence[Task], store: Store, shown: bool) -> Iterator[Watch]:
    """A function that hears what happens to tasks: bars at a terminal, else lines. On stderr: stdout has the result."""
    from rich.console import Console

    errors = Console(stderr=True, highlight=False)
    if not shown:
        yield lambda task, record: None
    elif errors.is_terminal:
        yield from bars(tasks, store, errors)
    else:
        yield lines(tasks, store)


def bars(tasks: Sequence[Task], store: Store, errors: Any) -> Iterator[Watch]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeRemainingColumn())
    finished = {task.key for task in tasks if store.finished(task)}
    running: dict[str, Any] = {}
    with Progress(*columns, console=errors, transient=True) as shown:
        whole = shown.add_task("all tasks", total=len(tasks), completed=len(finished), text="")

        def watch(task: Task, record: dict[str, Any]) -> None:
            kind = record["kind"]
            if kind in ("done", "failed", "lost"):
                if task.key in running:
                    shown.remove_task(running.pop(task.key))
                finished.update([task.key] if kind == "done" else [])
                errors.print(ended(task, record, store), markup=False)
            elif task.key not in running:
                running[task.key] = shown.add_task(name(task), total=None, text="")
            if kind == "train":
                shown.update(running[task.key], total=record["steps"], completed=record["step"])
            elif kind == "eval":
                text = f"epoch {record['epoch']:.0f}  top-1 {record['top1']:.2f}"
                shown.update(running[task.key], text=text)
            elif kind == "note":
                errors.print(f"{name(task)}: {record['text']}", markup=False)
            parts = [shown.tasks[shown.task_ids.index(bar)] for bar in running.values()]
            so_far = sum(part.completed / part.total for part in parts if part.total)
            text = f"{len(finished)} of {len(tasks)}"
            shown.update(whole, completed=len(finished) + so_far, text=text)

        yield watch


def lines(tasks: Sequence[Task], store: Store) -> Watch:
    """For a log file: the end of every task, and each run's progress now and then."""
    finished = {task.key for task in tasks if store.finished(task)}
    last: dict[str, float] = {}

    def watch(task: Task, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "done":
            finished.add(task.key)
        if kind in ("done", "failed", "lost"):
            print(f"[{len(finished)}/{len(tasks)}] {ended(task, record, store)}", file=sys.stderr, flush=True)
        elif kind == "note":
            print(f"{name(task)}: {record['text']}", file=sys.stderr, flush=True)
        elif kind == "eval" and time.monotonic() - last.get(task.key, 0) > PATIENCE:
            last[task.key] = time.monotonic()
            print(f"{name(task)}: epoch {record['epoch']:.0f}, top-1 {record['top1']:.2f}", file=sys.stderr, flush=True)

    return watch


def ended(task: Task, record: dict[str, Any], store: Store) -> str:
    from linvit.comparison.results import Run

    if record["kind"] != "done":
        return f"{name(task)}: {record['kind']}: {record.get('error') or record.get('text')}"
    found = store.result(task)
    top1 = f"top-1 {found.top1:.2f}" if isinstance(found, Run) else "timed"
    return f"{name(task)}: {top1}, {duration(found.seconds if found else 0)}"


def name(task: Task) -> str:
    label = task.label
    patch = f" patch {label.patch}" if label.patch else ""
    seed = f" seed {label.seed}" if task.kind != "speed" else " speed"
    return f"{label.candidate}{' (teacher)' if task.kind == 'teacher' else ''}{patch} {label.size} px{seed}"


def print_summary(tasks: Sequence[Task], store: Store, summary: Summary, as_json: bool) -> None:
    """What came of the tasks, and what they found."""
    from linvit.comparison import PAGE, report

    ended = {*summary.done, *summary.earlier}
    keys = list(dict.fromkeys(task.candidate_key for task in tasks))
    page = store.folder / PAGE
    found = report(store.folder, page).settings if summary.anything else ()
    by_key = {task.key: task for task in tasks}
    failed = [
        {"key": key, "label": to_plain(by_key[key].label), "error": store.failures(key)[-1].error}
        for key in summary.failed
    ]
    if as_json:
        rows = [row for setting in found for row in setting_json(setting, keys)]
        counts = {"done": summary.done, "earlier": summary.earlier, "missing": summary.missing}
        where = {"store": str(store.folder), "report": str(page) if found else None}
        print_json({**where, **counts, "failed": failed, "rows": rows, "notes": store.notes})
        return
    for setting in found:
        print_setting(setting, keys)
    for failure in failed:
        print(f"failed: {name(by_key[failure['key']])}: {failure['error']}")
    for note in store.notes:
        print(note)
    if not summary.complete:
        lacking = f"{len(summary.failed)} of {len(tasks)} tasks failed"
        lacking += f", {len(summary.missing)} are missing" if summary.missing else ""
        print(f"{lacking}: linvit compare -o {store.folder} --retry tries them again.")
    files = f"{len(ended)} result file{'s' if len(ended) != 1 else ''}"
    print(f"{files} in {store.folder}. Report: {page if found else 'none yet'}")


def print_setting(setting: Setting, keys: list[str]) -> None:
    from linvit.comparison.reporting.answer import at_own_size, clock_of

    rows = [row for row in setting.rows if row.first.candidate_key in keys]
    rows.sort(key=lambda row: keys.index(row.first.candidate_key))
    if not rows:
        return
    made = table(candidate=14, patch=-5, **{"top-1": -12, "to softmax": -14, "params M": -8, "MACs M": -7, "ms": -7})
    clock = clock_of(rows, many=False)
    for row in rows:
        made.add_row(*result_cells(row, at_own_size(row, clock)))
    out = console()
    out.print(setting.title, style="bold")
    out.print(made)
    notes = ["± is the 95 % interval over seeds", "“to softmax” is paired over seeds and images"]
    notes += [f"ms is one image of {rows[0].label.size} px on {clock.chip}"] if clock else []
    out.print("; ".join(notes) + ".", style="italic")


def result_cells(row: CandidateRow, timing: SpeedPoint | None) -> list[str]:
    top1 = f"{row.top1.mean:.2f}" + (f" ±{half(row.top1.interval):.2f}" if row.top1.interval else "")
    delta = "–"
    if row.delta is not None:
        delta = f"{row.delta.mean:+.2f}" + (f" ±{half(row.delta.interval):.2f}" if row.delta.interval else "")
    latency = None if timing is None else timing.median
    return [
        row.name,
        str(row.patch or "–"),
        top1,
        delta,
        f"{row.first.model.parameters / 1e6:.2f}",
        f"{row.first.model.macs / 1e6:,.0f}",
        "–" if latency is None else f"{latency:.2f}",
    ]


def half(interval: tuple[float, float]) -> float:
    return (interval[1] - interval[0]) / 2


def setting_json(setting: Setting, keys: list[str]) -> list[dict[str, Any]]:
    from linvit.comparison.reporting.answer import at_own_size, clock_of

    clock = clock_of(setting.rows, many=False)
    return [row_json(row, at_own_size(row, clock)) for row in setting.rows if row.first.candidate_key in keys]


def row_json(row: CandidateRow, timing: SpeedPoint | None) -> dict[str, Any]:
    return {
        "candidate": row.label.candidate,
        "kind": "teacher" if row.is_teacher else "run",
        **{name: getattr(row.label, name) for name in ("mode", "patch", "size")},
        "seeds": row.seeds,
        "top1": row.top1.mean,
        "top1_interval": row.top1.interval,
        "difference": row.delta.mean if row.delta is not None else None,
        "difference_interval": row.delta.interval if row.delta is not None else None,
        "parameters": row.first.model.parameters,
        "macs": row.first.model.macs,
        "milliseconds": None if timing is None else timing.median,
    }
