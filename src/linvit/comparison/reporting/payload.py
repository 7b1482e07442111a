"""What the page's script draws from: plain JSON, each environment and config once."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from linvit.attention import list_mechanisms
from linvit.codec import to_plain
from linvit.comparison.reporting.answer import Contents
from linvit.comparison.reporting.wording import SECONDARY, listing, metric_name
from linvit.comparison.results import Run
from linvit.comparison.statistics.naming import readable
from linvit.comparison.statistics.rows import BASELINE, CandidateRow, Setting, mean_of, teacher_of
from linvit.comparison.statistics.speeds import Ladder, use_of

HUES, SAFE_HUES, MARKERS = 16, 8, 9  # as many as the page's style sheet and script have
LONGEST = 150  # points of a curve
FIRST = ("castling", "stella", "mobile", "qt", "mixa")  # the five papers' come first, so that their hues differ

Json = dict[str, Any]


def place(values: list[Any], value: Any) -> int:
    """Where it lies among values that many runs have in common, kept once."""
    if value not in values:
        values.append(value)
    return values.index(value)


def payload(contents: Contents) -> Json:
    data: Json = {"chips": [], "environments": [], "configs": []}
    settings, rows = contents.settings, [row for setting in contents.settings for row in setting.rows]
    numbers = {id(row): number for number, row in enumerate(rows)}
    made = [{"setting": i, **row_data(row, data)} for i, setting in enumerate(settings) for row in setting.rows]
    picks = [
        {
            "setting": i,
            **vars(found),
            "chip": place(data["chips"], found.chip),
            "picks": [{**vars(pick), "row": numbers.get(id(pick.row), -1)} for pick in found.picks],
        }
        for i, answer in enumerate(contents.answers)
        for found in answer.picks
    ]
    titles = zip(settings, apart(settings), strict=True)
    return {
        "settings": [
            {
                "title": name,
                "mode": setting.mode,
                "metric": metric_name(setting.metric),
                "by_image": setting.by_image,
                "answer": told(contents, i),
                "facts": facts(contents, setting),
            }
            for i, (setting, name) in enumerate(titles)
        ],
        "secondary": {name: metric_name(name) for name in SECONDARY},
        "rows": rounded(made),
        "picks": rounded(picks),
        "names": {row.label.candidate: readable(row.label.candidate) for row in rows},
        "styles": styles(row.label.candidate for row in rows),
        **data,
        "timed": {speed.candidate_key: speed.command or "" for speed in contents.results.speeds},
    }


def told(contents: Contents, setting: int) -> list[list[str]]:
    """The sentences of a setting's answer, each in parts; every other part is a candidate's name."""
    names = {row.name for row in contents.settings[setting].rows} - {BASELINE} if contents.settings else set()
    pattern = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    said = contents.answers[setting].sentences if contents.answers else contents.answer.sentences
    return [re.split(rf"(?<![\w:])({pattern})(?![\w:])", text) if names else [text] for text in said]


def facts(contents: Contents, setting: Setting) -> str:
    """How the setting shown was made, and how much of it there is."""
    runs = [run for row in setting.rows if not row.is_teacher for run in row.runs]
    counted = [(len(runs), "run"), (len({run.label.candidate for run in runs}), "candidate")]
    counted.append((len({run.seed for run in runs}), "seed"))
    chips = sorted({ladder.chip for row in setting.rows for ladder in row.ladders})
    words = [setting.title, *(f"{number} {word}{'' if number == 1 else 's'}" for number, word in counted)]
    words += [f"timed on {listing(chips)}"] if chips else []
    failed = sum(failure.label.mode == setting.mode for failure in contents.results.failures)
    return " · ".join([*words, *([f"{failed} failed"] if failed else [])])


def apart(settings: Sequence[Setting]) -> list[str]:
    """What tells the settings apart, of their titles, so that a short list shows it."""
    parts = [setting.title.split(", ") for setting in settings]
    shared = set(parts[0]).intersection(*parts[1:]) if len(parts) > 1 else set()
    names = [", ".join(part for part in own if part not in shared) for own in parts]
    return [name[:1].upper() + name[1:] for name in names]


def row_data(row: CandidateRow, data: Json) -> Json:
    """What runs have in common goes to `data`."""
    first, accuracy = row.first, mean_of([run.accuracy for run in row.runs])
    return {
        **to_plain(row.label),
        **to_plain(first.model),
        "name": row.name,
        "teacher": row.is_teacher,
        "patch": row.patch,
        "key": first.candidate_key,
        "seeds": row.seeds,
        "score": row.score.mean,
        "metrics": row.metrics,
        "per_class": row.per_class,
        "interval": row.interval,
        "error": row.score.standard_error,
        "top5": accuracy.top5,
        "best": accuracy.best,
        "delta": {**to_plain(row.delta), "against": row.against} if row.delta else None,
        "training": to_plain(mean_of([run.training for run in row.runs])),
        "drift": {dtype: to_plain(row.drift(dtype)) for dtype in ("float16", "bfloat16")},
        "conversion": to_plain(row.conversion) if row.conversion else {},
        "curve": curve(row),
        "ladders": [ladder_data(ladder, data["chips"]) for ladder in row.ladders],
        "runs": [run_data(run, data) for run in row.runs],
    }


def curve(row: CandidateRow) -> list[Json]:
    """The score after each epoch: the mean, the least and the greatest over the seeds."""
    at: dict[float, list[float]] = defaultdict(list)
    for run in row.runs:
        for epoch in run.accuracy.epochs:
            at[float(epoch.epoch)].append(epoch.score)
    epochs = sorted(at)
    kept = ((epochs[i], at[epochs[i]]) for i in thinned(len(epochs)))
    return [{"epoch": e, "mean": float(np.mean(tops)), "low": min(tops), "high": max(tops)} for e, tops in kept]


def run_data(run: Run, data: Json) -> Json:
    identity = {name: value for name, value in to_plain(run.identity).items() if name not in ("seed", "data")}
    identity["config"] = {name: value for name, value in identity["config"].items() if name != "seed"}
    identity["teacher"] = teacher_of(run.identity) or None
    environment = {k: v for k, v in to_plain(run.environment).items() if k not in ("time", "command")}
    return {
        "key": run.key,
        "seed": run.seed,
        "score": run.score,
        "best": run.accuracy.best,
        "seconds": run.seconds,
        "shared": run.training.shared,
        "when": run.environment.time,
        "command": run.command,
        "conversion": run.conversion.report if run.conversion else None,
        "environment": place(data["environments"], environment),
        "config": place(data["configs"], identity),
    }


def ladder_data(ladder: Ladder, chips: list[str]) -> Json:
    return {
        **{name: to_plain(getattr(ladder, name)) for name in ("what", "many", "time", "memory")},
        "chip": place(chips, ladder.chip),
        "points": [
            {
                **{name: getattr(point, name) for name in ("size", "tokens", "batch")},
                **(to_plain(point.milliseconds) if point.milliseconds else {}),
                **{name: getattr(point, name) for name in ("images_per_second", "peak_bytes", "ratio")},
                "time": time,  # ms an image on softmax's scale
                "astray": point.size in ladder.astray,
                "note": point.note or "",
                "how": ", ".join(use_of(point)),
            }
            for point, time in zip(ladder.points, ladder.times, strict=True)
        ],
    }


def styles(candidates: Iterable[str]) -> dict[str, dict[str, int]]:
    """A colour for each candidate, a hue and its shade, nearly the same in every report, and a marker that tells close
    ones apart. Few candidates have the hues that every kind of colour vision tells apart. Softmax is drawn in the
    colour of the text: hue -1."""
    given = sorted(set(candidates))
    mechanisms = {candidate.partition(":")[0] for candidate in given}
    order = list(dict.fromkeys([*FIRST, *list_mechanisms(), *sorted(mechanisms)]))
    hues = SAFE_HUES if len(given) <= SAFE_HUES + 1 else HUES
    made: dict[str, dict[str, int]] = {BASELINE: {"hue": -1, "shade": 0, "marker": 0}}
    taken: set[tuple[int, int]] = set()
    for candidate in sorted(given, key=lambda candidate: (order.index(candidate.partition(":")[0]), candidate)):
        first = order.index(candidate.partition(":")[0])
        wanted = ((shade, (first + h) % hues) for shade in range(len(given) + 1) for h in range(hues))
        shade, hue = next(colour for colour in wanted if colour not in taken)
        if candidate not in made:
            taken.add((shade, hue))
            made[candidate] = {"hue": hue, "shade": shade, "marker": (4 * hue + 3 * shade + 4) % MARKERS}
    return {candidate: made[candidate] for candidate in given}


def thinned(length: int) -> list[int]:
    """Which points of a long curve to keep: evenly spread, the last among them."""
    kept: list[int] = np.linspace(0, length - 1, min(length, LONGEST)).round().astype(int).tolist()
    return kept


def rounded(value: Any) -> Any:
    """Plain data with its numbers in six significant digits."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
