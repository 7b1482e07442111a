"""How it was measured, and what to hold against it: sentences that something in the files calls for."""

from __future__ import annotations

import inspect
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence

from linvit.attention import list_mechanisms, mechanism_class
from linvit.comparison.reporting.wording import listing
from linvit.comparison.statistics.reading import Results
from linvit.comparison.statistics.rows import Setting
from linvit.conversion.plan import PLANS

METHOD = (
    "Within a setting all candidates share architecture, recipe, data, order of the images and seeds; only the"
    " attention changes, and patch size or resolution where the row says so. Accuracy is that of the last weights, not"
    " of the best.",
    "± beside an accuracy is its 95 % interval over the seeds for these validation images (Student's t); with a single"
    " seed, over the images.",
    "Δ is the difference to softmax trained with the same seeds, image by image. Its interval covers other seeds and"
    " other images (two-way random effects, Satterthwaite's degrees of freedom); for one seed, other images alone.",
    "Latency is of one image, throughput of a batch; both are medians, timed alone on the device, with softmax of the"
    " same architecture side by side in the same task. Ratios come from there. As a CUDA graph a pass is replayed, and"
    " what Python takes to start it does not count; as plain calls it does.",
    "Exponents are least-squares slopes of log time, or log memory, over log tokens, fitted to the upper half of the"
    " ladder (three points at least). They are of whole models, whose MLPs are linear: below 1 the device is not busy.",
    "MACs count contractions once each; FLOPs in the papers' tables follow the papers.",
)
NAMES = {
    "hardware": "Device",
    "cpu": "Processor",
    "threads": "Threads",
    "torch": "PyTorch",
    "cuda": "CUDA",
    "triton": "Triton",
    "timm": "timm",
    "python": "Python",
    "linvit": "linvit",
    "commit": "Commit",
    "source": "Source digest",
}


def method(settings: Sequence[Setting]) -> list[str]:
    lines = list(METHOD)
    if any(setting.mode == "distil" for setting in settings):
        lines.append(
            "Distilled: every candidate starts from the same softmax checkpoint. Zero-shot is its accuracy right after"
            " the swap, agreement how often it then chooses the teacher's class, KL the mean divergence from the"
            " teacher, in nats. Where softmax was not itself distilled, Δ is to the teacher."
        )
    return lines


def caveats(results: Results, settings: Sequence[Setting]) -> list[str]:
    """What a careful reader would ask about these very files."""
    rows = [row for setting in settings for row in setting.rows if not row.is_teacher]
    runs = [run for row in rows for run in row.runs]
    found = []
    single = sum(len(row.runs) == 1 for row in rows)
    if single:
        found.append(
            f"{single} of {len(rows)} rows rest on a single seed: their intervals know nothing of other seeds."
        )
    if len(rows) > 2:
        found.append(
            "Intervals are not corrected for how many there are: of twenty that mean nothing, one leaves out zero by"
            " chance."
        )
    shared = [run for run in runs if run.training.shared > 1]
    if shared:
        found.append(
            f"{len(shared)} of {len(runs)} trainings shared their device with others: training time, images/s and"
            " training memory there say little. Accuracy and inference speeds are not touched by it."
        )
    machines = {run.environment.hardware for run in runs}
    if len(machines) > 1:
        found.append(f"Trained on different machines: {listing(sorted(machines))}.")
    sources = {run.environment.source for run in runs}
    if len(sources) > 1:
        found.append(f"The runs come from {len(sources)} states of linvit's source; each names its own.")
    if any((run.environment.commit or "").endswith("+") for run in runs):
        found.append("Some runs were made from a working tree with uncommitted changes (commit ends in +).")
    if rows and min(row.first.data.validation for row in rows) < 1000:
        found.append("The validation set is small: one image more or less is visible in the accuracy.")
    unsafe = sorted({row.name for row in rows for d in ("float16", "bfloat16") if (f := row.drift(d)) and not f.finite})
    if unsafe:
        found.append(f"Not finite in half precision: {listing(unsafe)}.")
    points = [point for speed in results.speeds for point in speed.rows]
    untimed = sum(bool(point.note) for point in points)
    if untimed:
        found.append(f"{untimed} timings are missing; the charts and the table say why.")
    if not points:
        found.append("No speed was measured: latency, memory and exponents are empty.")
    if results.failures:
        number = len(results.failures)
        failed = "1 task failed" if number == 1 else f"{number} tasks failed"
        found.append(f"{failed}, and what would have been measured is missing.")
    return found + results.notes


def inferred(names: Iterable[str]) -> list[tuple[str, str]]:
    """(mechanisms, sentence) of what we inferred about those compared, from the mechanisms' own docstrings."""
    wanted: dict[str, None] = {}
    for name in names:
        parts = ("stella", "relu_quadratic") if name == "mixa" else (name,)
        wanted |= dict.fromkeys(part for part in parts if part in list_mechanisms())
    said: dict[str, list[str]] = defaultdict(list)
    for name in wanted:
        cls = mechanism_class(name)
        texts = (sys.modules[cls.__module__].__doc__, vars(cls).get("__doc__"))
        for sentence in (sentence for text in texts for sentence in sentences(text or "")):
            if re.search(r"\binferred\b", sentence, re.IGNORECASE) and not sentence.endswith(":"):
                said[sentence].append(name)
    found = [(listing(names), sentence) for sentence, names in said.items()]
    if "mixa" in names:
        plan = " ".join((inspect.getdoc(PLANS["mixa"]) or "").split())
        found += [("mixa", sentence) for sentence in sentences(plan) if "does not describe" in sentence]
    return found


def sentences(text: str) -> list[str]:
    """The sentences of a docstring's prose; formulas, which are indented, left out."""
    prose = [p for p in re.split(r"\n\s*\n", inspect.cleandoc(text)) if not p.startswith("    ")]
    found = (re.split(r"(?<=[.])\s+(?=[A-ZΑ-Ωα-ω½0-9])", " ".join(paragraph.split())) for paragraph in prose)
    return [sentence.strip() for part in found for sentence in part if sentence.strip()]


def hardware(results: Results) -> dict[str, list[str]]:
    """What the numbers were made with: every value that occurs, by its name."""
    trained = [*results.runs, *results.teachers.values()]
    found: dict[str, list[str]] = {}
    for name, words in NAMES.items():
        values = {getattr(result.environment, name) for result in [*trained, *results.speeds]} - {None}
        if values:
            found[words] = sorted(map(str, values))
    data = {
        f"{d.name} ({d.train:,} train, {d.validation:,} validation), digest {d.digest}"
        for d in (run.data for run in trained)
        if d.train is not None
    }
    if data:
        found["Data"] = sorted(data)
    seeds = sorted({run.seed for run in results.runs})
    if seeds:
        found["Seeds"] = [", ".join(map(str, seeds))]
    return found
