"""The comparison of the demo: what `linvit compare` and `linvit report` do, by the same functions, under one bar."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from linvit.cli.output import console, table
from linvit.comparison import report as write_report
from linvit.comparison.description.job import Job
from linvit.comparison.description.request import Request, read_request
from linvit.comparison.reporting import Contents
from linvit.comparison.results import Speed
from linvit.comparison.scheduling.places.choice import choose
from linvit.comparison.scheduling.store import Store
from linvit.comparison.statistics.rows import CandidateRow, Setting
from scripts.demo.screen import Screen

WORKERS = min(4, os.cpu_count() or 1)
SECONDS = {"teacher": 16.0, "run": 4.5, "speed": 7.0}  # about, on two cores: how far each moves the bar
DOING = {"teacher": "training the teacher", "run": "distilling", "speed": "timing"}


def compare(preset: str, folder: Path, screen: Screen) -> bool:
    """Do all jobs of a comparison; whether all of them succeeded. One that was killed goes on."""
    request = read_request(preset, {})
    store = open_store(folder, request, screen)
    command = ["linvit", "compare", preset, "-o", shown(folder), "--per-gpu", str(WORKERS)]
    screen.say(f"$ {' '.join(command)}")
    screen.at("comparing", 0.0, "starting workers")
    sys.argv = command  # what the result files name as theirs
    store.ask(request.comparisons[0])
    work = choose("auto", per_gpu=WORKERS)
    summary = work(request.jobs, store, watch=watcher(request.jobs, store, screen), retry=True)
    return summary.complete


def open_store(folder: Path, request: Request, screen: Screen) -> Store:
    """The store of a demo that was stopped on its way; else an empty one."""
    store = Store(folder)
    finished = sum(store.finished(job) for job in request.jobs)
    if finished < len(request.jobs) and store.comparisons() == request.comparisons:
        screen.say(f"Going on with a demo that was stopped: {finished} of {len(request.jobs)} jobs are done.")
        return store
    if folder.exists():
        screen.say("Beginning afresh: the last demo's results are removed.")
        shutil.rmtree(folder)
    return Store(folder)


def shown(path: Path) -> str:
    """A path as one would type it here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def watcher(jobs: Sequence[Job], store: Store, screen: Screen) -> Callable[[Job, dict[str, Any]], None]:
    """Hears what happens to jobs: moves the bar, and says how each ended."""
    shares = {job.key: float(store.finished(job)) for job in jobs}
    weights = {job.key: SECONDS[job.kind] for job in jobs}
    running: dict[str, Job] = {}

    def watch(job: Job, record: dict[str, Any]) -> None:
        kind = record["kind"]
        if kind == "start":
            running[job.key] = job
        elif kind == "train":
            shares[job.key] = record["step"] / record["steps"]
        elif kind == "speed":
            rows = 2 * len(job.identity.ladder) + 1  # one image and a batch at each size, and a training step
            shares[job.key] = min(1.0, shares[job.key] + 1 / rows)
        elif kind in ("done", "failed", "lost"):
            running.pop(job.key, None)
            shares[job.key] = float(kind == "done")
            screen.say(ended(job, record, store))
        share = sum(weights[key] * shares[key] for key in weights) / sum(weights.values())
        screen.at("comparing", share, doing(list(running.values())))

    return watch


def doing(jobs: Sequence[Job]) -> str:
    if not jobs:
        return "starting workers"
    kind = jobs[0].kind
    return DOING[kind] if kind == "teacher" else f"{DOING[kind]} {', '.join(job.label.candidate for job in jobs)}"


def ended(job: Job, record: dict[str, Any], store: Store) -> str:
    name = "teacher" if job.kind == "teacher" else job.label.candidate
    found = store.result(job)
    if record["kind"] != "done" or found is None:
        return f"  {name:<12} {record['kind']}: {record.get('error') or record.get('text')}"
    if isinstance(found, Speed):
        last = [row for row in found.rows if row.what == "inference"][-1]
        if last.median is None:
            return f"  {name:<12} {last.note}"
        spent = f"{last.median:.0f} ms for {last.batch} images of {last.size} px"
        gain = "" if last.ratio in (None, 1.0) else f", {last.ratio:.2f} times softmax's speed"
        return f"  {name:<12} {spent}{gain}"
    if found.conversion is None:
        return f"  {name:<12} {found.score:.1f} % of {found.data.validation} digits right"
    zero_shot = found.conversion.zero_shot
    return f"  {name:<12} {zero_shot:.1f} % right after conversion, {found.score:.1f} % after distilling"


def report(store: Path, page: Path, screen: Screen) -> Contents:
    """Write the page."""
    screen.say(f"$ linvit report {shown(store)} -o {shown(page)}")
    screen.at("comparing", 1.0, "writing the report")
    return write_report(store, page)


def show(contents: Contents) -> None:
    """The comparison as a table, what it is worth, and the report's first sentences."""
    setting = contents.settings[0]
    rows = sorted((row for row in setting.rows if not row.is_teacher), key=order)
    top = max(timing.size for row in rows for ladder in row.ladders for timing in ladder.points)
    last = f"at {top} px"
    made = table(candidate=12, converted=-9, distilled=-9, **{"to softmax": -10, "ms": -5, last: -9, "drift": -5})
    for row in rows:
        made.add_row(*cells(row, top))
    out = console()
    out.print()
    out.rule("Other attentions in the place of softmax", align="left")
    out.print(made)
    out.print(caption(setting, rows[0], top), style="italic")
    for sentence in contents.answer.sentences:
        out.print(sentence)


def order(row: CandidateRow) -> tuple[bool, float]:
    """Softmax first, then the best."""
    return row.label.candidate != "softmax", -row.score.mean


def cells(row: CandidateRow, top: int) -> list[str]:
    before = row.conversion.zero_shot if row.conversion else None
    delta, drift = row.delta, row.drift("bfloat16")
    difference = "–"
    if delta is not None:
        half = f" ±{(delta.interval[1] - delta.interval[0]) / 2:.1f}" if delta.interval else ""
        difference = f"{delta.mean:+.1f}{half}"
    speeds = [(found.many, timing) for found in row.ladders if found.what == "inference" for timing in found.points]
    alone = next((timing.median for many, timing in speeds if not many and timing.size == row.label.size), None)
    gain = next((timing.ratio for many, timing in speeds if many and timing.size == top), None)
    return [
        row.label.candidate,
        "–" if before is None else f"{before:.1f} %",
        f"{row.score.mean:.1f} %",
        difference,
        "–" if alone is None else f"{alone:.1f}",
        "–" if gain is None else f"{gain:.2f}×",
        "–" if drift is None or drift.relative_rms is None else f"{100 * drift.relative_rms:.1f} %",
    ]


def caption(setting: Setting, row: CandidateRow, top: int) -> str:
    data, seeds = row.first.data, len(row.seeds)
    teacher = next((row.score.mean for row in setting.rows if row.is_teacher), None)
    taught = "" if teacher is None else f"The teacher scored {teacher:.1f} %. "
    return (
        f"{data.name}: {data.train:,} images to learn from, {data.validation} to check; "
        f"{'one seed' if seeds == 1 else f'{seeds} seeds'}, every candidate by the same recipe. {taught}"
        "“to softmax” has a 95 % interval, paired over images: what lies within it is noise, also where it flatters. "
        f"ms is one image of {row.label.size} px. “at {top} px” is a batch's speed against softmax, by turns, and the "
        "busier the machine, the rougher. One thread, float32. “drift” is how far the outputs move in bfloat16."
    )
