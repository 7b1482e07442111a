"""What the page's script draws from: plain JSON, each environment and config once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from linvit.attention import list_mechanisms
from linvit.comparison.report.answer import Answer
from linvit.comparison.report.reading import Results, Run, digest
from linvit.comparison.report.rows import BASELINE, Row, Setting, Speed, stripped_environment, use_of
from linvit.comparison.statistics import Fit

HUES, MARKERS = 8, 9  # as many as the page's style sheet and script have
LONGEST = 150  # points of a curve
FIRST = ("castling", "stella", "mobile", "qt", "mixa")  # the five papers' come first, so that their hues differ

TRAINING = ("seconds", "images_per_second", "peak_bytes", "shared")
CONVERSION = ("zero_shot", "teacher_top1", "agreement", "kl")

Json = dict[str, Any]


class Shared:
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
    environments, configs, chips = Shared(), Shared(), Shared()
    rows: list[Json] = []
    places: dict[int, int] = {}
    for number, setting in enumerate(settings):
        for row in setting.rows:
            places[id(row)] = len(rows)
            rows.append({"setting": number, **row_data(row, environments, configs, chips)})
    ladders = [
        {
            "chip": chips.place(ladder.chip),
            "many": ladder.many,
            "batch": ladder.batch,
            "tolerance": ladder.tolerance,
            "picks": [
                [
                    pick.tokens,
                    pick.size,
                    places.get(id(pick.row), -1),
                    rounded(pick.ratio),
                    list(pick.rivals),
                    pick.lost,
                ]
                for pick in ladder.picks
            ],
        }
        for ladder in answer.ladders
    ]
    candidates = [row.first.candidate for setting in settings for row in setting.rows]
    return {
        "settings": [
            {"title": name, "mode": setting.mode} for setting, name in zip(settings, apart(settings), strict=True)
        ],
        "rows": rows,
        "ladders": ladders,
        "styles": styles(candidates),
        "chips": chips.values,
        "environments": environments.values,
        "configs": configs.values,
        "timed": {str(data["candidate_key"]): str(data.get("command") or "") for data in results.speeds},
    }


def apart(settings: Sequence[Setting]) -> list[str]:
    """What tells the settings apart, of their titles, so that a short list shows it."""
    parts = [setting.title.split(", ") for setting in settings]
    shared = set(parts[0]).intersection(*parts[1:]) if len(parts) > 1 else set()
    names = [", ".join(part for part in own if part not in shared) for own in parts]
    return [name[:1].upper() + name[1:] for name in names]


def row_data(row: Row, environments: Shared, configs: Shared, chips: Shared) -> Json:
    first, curve = row.first, row.curve()
    return {
        "name": row.name,
        "candidate": first.candidate,
        "mechanism": first.mechanism,
        "paper": first.paper,
        "teacher": row.is_teacher,
        "patch": first.patch,
        "size": first.size,
        "tokens": row.tokens,
        "key": first.candidate_key,
        "seeds": row.seeds,
        "top1": rounded(row.top1.mean),
        "ends": rounded_all(row.interval),
        "error": rounded(row.top1.standard_error),
        "top5": rounded(row.mean("accuracy", "top5")),
        "best": rounded(row.mean("accuracy", "best")),
        "delta": delta_data(row),
        "parameters": first.number("model", "parameters"),
        "macs": first.number("model", "macs"),
        "training": {name: rounded(row.mean("training", name)) for name in TRAINING},
        "drift": {dtype: drift_data(row, dtype) for dtype in ("float16", "bfloat16")},
        "conversion": {name: rounded(row.mean("conversion", name)) for name in CONVERSION},
        "curve": [[rounded(value) for value in column[:4]] for column in (curve[i] for i in thinned(len(curve)))],
        "speeds": [speed_data(speed, chips) for speed in row.speeds],
        "runs": [run_data(run, environments, configs) for run in row.runs],
    }


def delta_data(row: Row) -> Json | None:
    if row.delta is None:
        return None
    return {
        "mean": rounded(row.delta.mean),
        "ends": rounded_all(row.delta.interval),
        "seeds_ends": rounded_all(row.delta.seeds_interval),
        "seeds": row.delta.seeds,
        "images": row.delta.images,
        "against": row.against,
    }


def drift_data(row: Row, dtype: str) -> list[Any] | None:
    found = row.drift(dtype)
    return None if found is None else [rounded(found[0]), rounded(found[1]), found[2]]


def run_data(run: Run, environments: Shared, configs: Shared) -> Json:
    identity = {name: value for name, value in (run.get("identity") or {}).items() if name not in ("seed", "data")}
    identity["config"] = {k: v for k, v in (identity.get("config") or {}).items() if k != "seed"}
    identity["teacher"] = run.teacher or None
    return {
        "key": run.key,
        "seed": run.seed,
        "top1": rounded(run.top1),
        "best": rounded(run.number("accuracy", "best")),
        "seconds": rounded(run.number("seconds")),
        "shared": run.number("training", "shared"),
        "when": run.get("environment", "time"),
        "command": run.get("command"),
        "conversion": run.get("conversion", "report"),
        "environment": environments.place(stripped_environment(run.data)),
        "config": configs.place(identity),
    }


def speed_data(speed: Speed, chips: Shared) -> Json:
    return {
        "chip": chips.place(speed.chip),
        "what": speed.what,
        "many": speed.many,
        "time": fit_data(speed.time),
        "memory": fit_data(speed.memory),
        "ladder": [
            [
                *(t.size, t.tokens, t.batch),
                *map(rounded, (t.median, t.low, t.high, t.images_per_second, t.peak_bytes, t.ratio)),
                *(t.note, ", ".join(use_of(t))),
            ]
            for t in speed.ladder
        ],
    }


def fit_data(fit: Fit | None) -> Json | None:
    if fit is None:
        return None
    return {"exponent": rounded(fit.exponent), "ends": rounded_all(fit.interval), "points": fit.points}


def styles(candidates: Iterable[str]) -> dict[str, list[int]]:
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
    made: dict[str, list[int]] = {}
    for candidate in sorted(given, key=lambda candidate: (order.index(candidate.partition(":")[0]), candidate)):
        hue = hues[candidate.partition(":")[0]]
        taken = {marker for other, marker in made.values() if other == hue}
        free = [m * 4 % MARKERS for m in range(hue + 1, hue + 1 + MARKERS) if m * 4 % MARKERS not in taken]
        marker = free[0] if free else 0
        made[candidate] = [hue, marker]
    return made


def thinned(length: int) -> list[int]:
    """Which points of a long curve to keep: evenly spread, the last among them."""
    if length <= LONGEST:
        return list(range(length))
    return sorted({round(i * (length - 1) / (LONGEST - 1)) for i in range(LONGEST)})


def rounded(value: float | None) -> float | None:
    """Six significant digits."""
    return None if value is None else float(f"{value:.6g}")


def rounded_all(values: Sequence[float] | None) -> list[float | None] | None:
    return None if values is None else [rounded(value) for value in values]
