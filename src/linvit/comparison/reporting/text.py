"""The report as text: Markdown for a page of documentation, and CSV, with a line for each run and timing."""

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from linvit.codec import to_plain
from linvit.comparison.reporting.answer import Contents, at_own_size, clock_of, clocks, main_rows, side_by_side
from linvit.comparison.reporting.caveats import caveats, hardware, inferred, method
from linvit.comparison.reporting.published import PaperClaim, Ranking, claims, rankings
from linvit.comparison.reporting.wording import (
    SECONDARY,
    change,
    count,
    listing,
    megabytes,
    metric_name,
    minus,
    multiple,
    short,
    three,
)
from linvit.comparison.results import Run, SpeedPoint
from linvit.comparison.statistics.estimates import pareto_front
from linvit.comparison.statistics.rows import CandidateRow, Setting
from linvit.comparison.statistics.speeds import Ladder

WORDS = ("", "job", "error", "paper", "theirs", "against")  # columns of words, not of numbers
ALONE = (
    "× softmax is the throughput, taken side by side with softmax; latency and images per second were taken alone, each"
    " in its own job, and do not rank candidates."
)
COLUMNS = (
    *("kind", "setting", "mode", "data", "candidate", "mechanism", "paper", "patch", "size", "tokens", "seed", "key"),
    *("metric", "top1", "top5", "best", "standard_error", "loss", "parameters", "macs"),
    *("training_seconds", "training_images_per_second", "training_peak_bytes", "training_shared"),
    *("zero_shot", "teacher_top1", "agreement", "kl", "float16_rms", "bfloat16_rms"),
    *("device", "hardware", "pass", "batch", "precision", "compiled", "cuda_graph", "median_ms", "low_ms", "high_ms"),
    *("images_per_second", "peak_bytes", "ratio_to_softmax", "shared", "note", "commit", "command"),
)


def markdown(contents: Contents) -> str:
    """The whole report as text."""
    blocks = [" ".join(map(plain, contents.answer.sentences))]
    for setting in contents.settings:
        blocks.append(f"## {plain(setting.title)}")
        for rows in sorted(setting.places(teachers=True), key=lambda rows: rows[0].place):  # the finest patches first
            blocks += place(setting, sorted(rows, key=lambda row: -row.score.mean))
        blocks += [ranking(found) for found in rankings(setting)]
        claimed = claims(main_rows(setting))
        blocks += [claims_table(claimed)] if claimed else []
    blocks += ["## How it was measured", bullets(method(contents.settings))]
    blocks += ["Caveats:", bullets(caveats(contents.results, contents.settings))]
    ours = inferred(sorted({run.label.mechanism for run in contents.results.runs}))
    blocks += ["Inferred, where a paper is silent:", bullets(f"{name}: {text}" for name, text in ours)] if ours else []
    made = ((name, ", ".join(values)) for name, values in hardware(contents.results).items())
    blocks.append(table(["made with", ""], made))
    if contents.results.failures:
        failed = ((f.label.candidate, f.key, f.error) for f in contents.results.failures)
        blocks += ["## What failed", table(["candidate", "job", "error"], failed)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def place(setting: Setting, rows: Sequence[CandidateRow]) -> list[str]:
    first = rows[0]
    patch = f"Patches of {first.patch}, " if first.patch else ""
    blocks = [
        f"### {patch}{first.label.size} pixels, {count(first.first.model.tokens)} tokens",
        results(setting, rows),
        front(rows),
    ]
    for clock in clocks(rows):
        batch = f"batches of {clock.points[0].batch}" if clock.many else "one image at a time"
        blocks += [f"Times softmax's speed on {plain(clock.chip)}, {batch}:", speeds(rows, clock)]
    return blocks


def results(setting: Setting, rows: Sequence[CandidateRow]) -> str:
    distil = setting.mode == "distil"
    others = [name for name in SECONDARY if any(name in row.metrics for row in rows)]
    part = next((f" ({row.first.model.counted})" for row in rows if row.first.model.counted), "")
    base = "teacher" if setting.of_features else "softmax"
    heads = ["candidate", f"{metric_name(setting.metric)}, %", f"Δ {base}, points"]
    heads += [f"{metric_name(name)}, %{' (Δ)' if any(name in row.deltas for row in rows) else ''}" for name in others]
    heads += ["zero-shot, %", *(["agrees, %", "KL"] if setting.by_image else [])] if distil else []
    heads += ["seeds", "parameters", f"MACs{part}", "× softmax", "latency alone, ms", "images/s alone", "memory"]
    single, batch = (clock_of(rows, many=many) for many in (False, True))
    lines = []
    for row in rows:
        ends, delta = row.interval, row.delta
        spread = f" ± {(ends[1] - ends[0]) / 2:.2f}" if ends else ""
        cells = [row.name, f"{row.score.mean:.2f}{spread}"]
        cells.append(change(delta.mean, delta.interval) if delta else "–")
        cells += [beside(row, name) for name in others]
        if distil:
            found = row.conversion
            numbers = (found.zero_shot, found.agreement, found.kl) if found else [None] * 3
            cells += [three(number) for number in numbers[: 3 if setting.by_image else 1]]
        one, many = at_own_size(row, single), at_own_size(row, batch)
        cells += [str(len(row.runs)), short(row.first.model.parameters), short(row.first.model.macs)]
        cells += [times(side_by_side(row, batch)), three(one.median if one else None)]
        cells += [count(many.images_per_second), megabytes(many.peak_bytes)] if many else ["–", "–"]
        lines.append(cells)
    chips = dict.fromkeys(clock.chip for clock in (single, batch) if clock)
    timed = f"\n\n{ALONE} Timed on {plain(listing(list(chips)))}." if chips else ""
    return table(heads, lines) + timed


def beside(row: CandidateRow, name: str) -> str:
    """Another metric than the main one, with its difference to the teacher where that is known."""
    if name not in row.metrics:
        return "–"
    delta = row.deltas.get(name)
    return f"{row.metrics[name]:.2f}" + (f" ({change(delta.mean, delta.interval)})" if delta else "")


def front(rows: Sequence[CandidateRow]) -> str:
    """Which candidates nobody beats in accuracy and throughput both."""
    clock = clock_of(rows, many=True)
    timed = [(row, 1 / ratio) for row in rows if (ratio := side_by_side(row, clock))]
    if len(timed) < 2:
        return ""
    best = pareto_front([cost for _, cost in timed], [row.score.mean for row, _ in timed])
    return f"Nothing here is both faster and more accurate than {plain(listing([timed[i][0].name for i in best]))}."


def speeds(rows: Sequence[CandidateRow], clock: Ladder) -> str:
    tokens = sorted({point.tokens for row in rows for point in row.points_by(clock)})
    lines = []
    for row in rows:
        found = next((s for s in row.ladders if s.same_clock(clock)), None)
        if found is None or row.is_teacher:
            continue
        at = {t.tokens: t for t in found.points}
        cells = [told(at.get(n)) for n in tokens]
        fit = found.time
        ends = minus(f" [{fit.interval[0]:.2f}, {fit.interval[1]:.2f}]") if fit and fit.interval else ""
        lines.append([row.name, *cells, f"{minus(f'{fit.exponent:.2f}')}{ends}" if fit else "–"])
    return table(["candidate", *(f"{count(n)} tokens" for n in tokens), "exponent of time"], lines)


def times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def told(timing: SpeedPoint | None) -> str:
    if timing is None:
        return "–"
    if timing.median is None:
        return timing.note or "–"
    return multiple(timing.ratio) if timing.ratio is not None else f"{three(timing.median)} ms alone"


def ranking(found: Ranking) -> str:
    title = f"The Fair Comparison's order ({found.section.lower()}, theirs) beside ours (patches of {found.patch})."
    heads = ["candidate", "theirs", "their top-1", "rank", "our top-1", "rank"]
    return f"{title} {plain(found.verdict())}\n\n{table(heads, (line[:6] for line in found.lines()))}"


def claims_table(claimed: Sequence[PaperClaim]) -> str:
    lines = (
        [c.ours.name, f"{c.paper}, {c.model}", minus(f"{c.theirs:+.2g}"), c.against, change(c.difference, c.interval)]
        for c in claimed
    )
    return table(["candidate", "paper", "their change in top-1", "against", "ours"], lines)


def table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = "|".join("---" if i == 0 or head in WORDS else "---:" for i, head in enumerate(heads))
    body = [f"| {' | '.join(map(plain, line))} |" for line in lines]
    return "\n".join([f"| {' | '.join(heads)} |", f"|{rule}|", *body])


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {plain(line)}" for line in lines)


def plain(text: str) -> str:
    """Text from a file that Markdown, and the HTML in it, reads as text."""
    text = " ".join(str(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\|*`\[\]])", r"\\\1", text)


def spreadsheet(contents: Contents) -> str:
    """The report as CSV."""
    text, runs = io.StringIO(), contents.results.runs
    columns = dict.fromkeys([*COLUMNS, *(name for run in runs for name in by_metric(run))])
    writer = csv.DictWriter(text, list(columns), extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for line in [*run_lines(contents), *speed_lines(contents)]:
        writer.writerow({name: harmless(value) for name, value in line.items()})
    return text.getvalue()


def run_lines(contents: Contents) -> Iterator[dict[str, Any]]:
    found = ((setting, row, run) for setting in contents.settings for row in setting.rows for run in row.runs)
    for setting, row, run in found:
        yield {
            **to_plain(run.label),
            **to_plain(run.accuracy),
            **to_plain(run.model),
            **(to_plain(run.conversion) if run.conversion else {}),
            **{f"training_{name}": value for name, value in to_plain(run.training).items()},
            **{f"{drift.dtype}_rms": drift.relative_rms for drift in run.drift},
            **by_metric(run),
            "kind": "teacher" if row.is_teacher else "run",
            "setting": setting.title,
            "key": run.key,
            "data": run.data.name,
            "device": run.training.device,
            "hardware": run.environment.hardware,
            "commit": run.environment.commit,
            "command": run.command,
        }


def by_metric(run: Run) -> dict[str, Any]:
    """What a run is judged by. The metrics of detectors and segmenters have columns of their own."""
    metric, found = run.accuracy.metric, run.conversion
    if run.by_image:
        return {"metric": metric}
    taught = {f"teacher_{metric}": found.teacher_score} if found else {}
    return {"metric": metric, "top1": None, "teacher_top1": None, **taught, **run.accuracy.metrics}


def speed_lines(contents: Contents) -> Iterator[dict[str, Any]]:
    """Every timing once, though rows of two settings may share it."""
    for speed in contents.results.speeds:
        for point in speed.rows:
            yield {
                "kind": "speed",
                **{name: getattr(speed.label, name) for name in ("candidate", "mechanism", "paper", "patch")},
                **to_plain(point),
                **{f"{name}_ms": value for name, value in to_plain(point.milliseconds or {}).items()},
                "hardware": speed.chip(point),
                "ratio_to_softmax": point.ratio,
                "key": speed.key,
                "command": speed.command,
            }


def harmless(value: Any) -> Any:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value
