"""What the page's script draws from: plain JSON, each environment and config once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from linvit.attention import list_mechanisms
from linvit.codec import digest, to_plain
from linvit.comparison.reporting.answer import Answer
from linvit.comparison.results import Run
from linvit.comparison.statistics.reading import Results
from linvit.comparison.statistics.rows import BASELINE, CandidateRow, Ladder, Setting, teacher_of, use_of

HUES, MARKERS = 8, 9  # as many as the page's style sheet and script have
LONGEST = 150  # points of a curve
FIRST = ("castling", "stella", "mobile", "qt", "mixa")  # the five papers' come first, so that their hues differ

Json = dict[str, Any]


class Once:
    """Values that many runs have in common, kept once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.places: dict[str, int] = {}

    def place(self, value: Any) -> int:
        key = digest(value)
        if key not in self.places:
            self.places[key] = len(self.values)
            self.values.append(value)
        return self.places[key]


def payload(results: Results, settings: Sequence[Setting], answer: Answer) -> Json:
    environments, configs, chips = Once(), Once(), Once()
    rows: list[Json] = []
    places: dict[int, int] = {}
    for number, setting in enumerate(settings):
        for row in setting.rows:
            places[id(row)] = len(rows)
            rows.append({"setting": number, **row_data(row, environments, configs, chips)})
    picks = [
        {
            **vars(found),
            "chip": chips.place(found.chip),
            "picks": [{**vars(pick), "row": places.get(id(pick.row), -1)} for pick in found.picks],
        }
        for found in answer.picks
    ]
    return {
        "settings": [
            {"title": name, "mode": setting.mode} for setting, name in zip(settings, apart(settings), strict=True)
        ],
        "rows": rounded(rows),
        "picks": rounded(picks),
        "styles": styles(row.label.candidate for setting in settings for row in setting.rows),
        "chips": chips.values,
        "environments": environments.values,
        "configs": configs.values,
        "timed": {speed.candidate_key: speed.command or "" for speed in results.speeds},
    }


def apart(settings: Sequence[Setting]) -> list[str]:
    """What tells the settings apart, of their titles, so that a short list shows it."""
    parts = [setting.title.split(", ") for setting in settings]
    shared = set(parts[0]).intersection(*parts[1:]) if len(parts) > 1 else set()
    names = [", ".join(part for part in own if part not in shared) for own in parts]
    return [name[:1].upper() + name[1:] for name in names]


def row_data(row: CandidateRow, environments: Once, configs: Once, chips: Once) -> Json:
    first, curve = row.first, row.curve()
    return {
        **to_plain(row.label),
        **to_plain(first.model),
        "name": row.name,
        "teacher": row.is_teacher,
        "patch": row.patch,
        "key": first.candidate_key,
        "seeds": row.seeds,
        "top1": row.top1.mean,
        "interval": row.interval,
        "error": row.top1.standard_error,
        "top5": row.mean(lambda run: run.accuracy.top5),
        "best": row.mean(lambda run: run.accuracy.best),
        "delta": {**to_plain(row.delta), "against": row.against} if row.delta else None,
        "training": to_plain(row.training),
        "drift": {dtype: to_plain(row.drift(dtype)) for dtype in ("float16", "bfloat16")},
        "conversion": to_plain(row.conversion) if row.conversion else {},
        "curve": [to_plain(curve[i]) for i in thinned(len(curve))],
        "ladders": [ladder_data(ladder, chips) for ladder in row.ladders],
        "runs": [run_data(run, environments, configs) for run in row.runs],
    }


def run_data(run: Run, environments: Once, configs: Once) -> Json:
    identity = {name: value for name, value in to_plain(run.identity).items() if name not in ("seed", "data")}
    identity["config"] = {name: value for name, value in identity["config"].items() if name != "seed"}
    identity["teacher"] = teacher_of(run.identity) or None
    environment = {k: v for k, v in to_plain(run.environment).items() if k not in ("time", "command")}
    return {
        "key": run.key,
        "seed": run.seed,
        "top1": run.top1,
        "best": run.accuracy.best,
        "seconds": run.seconds,
        "shared": run.training.shared,
        "when": run.environment.time,
        "command": run.command,
        "conversion": run.conversion.report if run.conversion else None,
        "environment": environments.place(environment),
        "config": configs.place(identity),
    }


def ladder_data(ladder: Ladder, chips: Once) -> Json:
    return {
        **to_plain(ladder),
        "chip": chips.place(ladder.chip),
        "points": [
            {
                **{name: getattr(point, name) for name in ("size", "tokens", "batch")},
                **(to_plain(point.milliseconds) if point.milliseconds else {}),
                **{name: getattr(point, name) for name in ("images_per_second", "peak_bytes", "ratio")},
                "note": point.note or "",
                "how": ", ".join(use_of(point)),
            }
            for point in ladder.points
        ],
    }


def styles(candidates: Iterable[str]) -> dict[str, dict[str, int]]:
    """A hue for each mechanism, nearly the same in every report, and a marker that tells those of one hue apart; a
    mechanism's variants share its hue. Softmax is drawn in the colour of the text: hue -1."""
    given = sorted(set(candidates))
    mechanisms = {candidate.partition(":")[0] for candidate in given} - {BASELINE}
    order = list(dict.fromkeys([*FIRST, *list_mechanisms(), *sorted(mechanisms)]))
    hues = {BASELINE: -1}
    most = -(-len(mechanisms) // HUES)
    for name in sorted(mechanisms, key=order.index):
        wanted = (order.index(name) + h for h in range(HUES))
        hues[name] = next(h % HUES for h in wanted if list(hues.values()).count(h % HUES) < most)
    made: dict[str, dict[str, int]] = {}
    for candidate in sorted(given, key=lambda candidate: (order.index(candidate.partition(":")[0]), candidate)):
        hue = hues[candidate.partition(":")[0]]
        taken = {style["marker"] for style in made.values() if style["hue"] == hue}
        free = [m * 4 % MARKERS for m in range(hue + 1, hue + 1 + MARKERS) if m * 4 % MARKERS not in taken]
        made[candidate] = {"hue": hue, "marker": free[0] if free else 0}
    return made


def thinned(length: int) -> list[int]:
    """Which points of a long curve to keep: evenly spread, the last among them."""
    if length <= LONGEST:
        return list(range(length))
    return sorted({round(i * (length - 1) / (LONGEST - 1)) for i in range(LONGEST)})


def rounded(value: Any) -> Any:
    """Plain data with its numbers in six significant digits."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
