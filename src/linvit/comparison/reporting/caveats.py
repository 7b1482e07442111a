"""How it was measured, and what to hold against it: sentences that something in the files calls for."""

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

COMMON = (
    "Within a setting all candidates share architecture, recipe, data, order of the images and seeds; only the"
    " attention changes, and patch size or resolution where the row says so. Accuracy is that of the last weights, not"
    " of the best."
)
CLASSIFIED = (
    "± beside an accuracy is its 95 % interval over the seeds for these validation images (Student's t); with a single"
    " seed, over the images.",
    "Δ is the difference to softmax trained with the same seeds, image by image. Its interval covers other seeds and"
    " other images (two-way random effects, Satterthwaite's degrees of freedom); for one seed, other images alone.",
)
DENSE = (
    "mAP and mIoU are of the whole validation set, in percent. ± beside one is its 95 % interval over the seeds"
    " (Student's t); a single seed has none.",
    "Δ of them is the mean difference to softmax trained with the same seed, which has the same initial weights and"
    " sees the same images in the same order. Its interval is Student's t over these paired seeds. Nothing is paired"
    " image by image, so neither interval says how other validation images would turn out.",
    "Speeds of detectors and segmenters are of whole models with float32 weights, under autocast in half precision; a"
    " training step learns from objects or labels drawn at random. A detector's MACs are its backbone's: what follows"
    " its proposals depends on the image.",
)
FEATURES = (
    "Features: nothing was learnt from labels. kNN (20 neighbours by cosine, as DINO weighs them) and the ridge probe"
    " are made from the training images and asked about the validation images; neighbours is how many of these have"
    " the same nearest other one as by the teacher's features; cosines with those are in percent. ± is the 95 %"
    " interval over the seeds. Δ is to the teacher itself, by its own kNN and probe; its interval covers other seeds"
    " and other images.",
)
SPEEDS = (
    "Latency is of one image, throughput of a batch; both are medians, with nothing else on the device and softmax of"
    " the same architecture timed side by side in the same job. Ratios come from there, and all that is ranked, drawn"
    " or said comes from the ratios: a time in a chart is softmax's divided by the ratio. Milliseconds and images/s in"
    " tables were taken alone, each in its own job. As a CUDA graph a pass is replayed, and what Python takes to start"
    " it does not count; as plain calls it does.",
    "Exponents are least-squares slopes of log time, or log memory, over log tokens, fitted to the upper half of the"
    " ladder (three points at least). They are of whole models, whose MLPs are linear: below 1 the device is not busy.",
    "MACs count contractions once each; FLOPs in the papers' tables follow the papers.",
)
DISTILLED = (
    "Distilled: every candidate starts from the same softmax checkpoint. Zero-shot is its accuracy right after the"
    " swap{}. Where softmax was not itself distilled, Δ is to the teacher."
)
AGREEMENT = (
    ", agreement how often it then chooses the teacher's class, KL the mean divergence from the teacher, in nats"
)
MANY = "Intervals are not corrected for how many there are: of twenty that mean nothing, one leaves out zero by chance."
SHARED = (
    "shared their device with others: training time, images/s and training memory there say little. Accuracy and"
    " inference speeds are not touched by it."
)
DISTURBED = (
    "were taken while other trainings had the device: their milliseconds say little, and their ratios, timed by turns,"
    " only somewhat more."
)
ASTRAY = (
    "Times taken alone and ratios taken side by side disagree by more than their spread, because softmax itself took"
    " another time in its own job; the ratios count, here and above. By device:"
)
UNCOMMITTED = "Some runs were made from a working tree with uncommitted changes (commit ends in +)."
SMALL = "The validation set is small: one image more or less is visible in the accuracy."
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
    """What was done, for the kinds of models that are here."""
    kinds = {"features" if setting.of_features else setting.by_image for setting in settings} or {True}
    said = [COMMON, *(CLASSIFIED if True in kinds else ()), *(DENSE if False in kinds else ())]
    said += [*(FEATURES if "features" in kinds else ()), *SPEEDS]
    distilled = [setting.by_image for setting in settings if setting.mode == "distil"]
    return [*said, DISTILLED.format(AGREEMENT if any(distilled) else "")] if distilled else said


def caveats(results: Results, settings: Sequence[Setting]) -> list[str]:
    """What a careful reader would ask about these very files."""
    rows = [row for setting in settings for row in setting.rows if not row.is_teacher]
    runs = [run for row in rows for run in row.runs]
    single, seeing = sum(len(row.runs) == 1 for row in rows), all(row.first.by_image for row in rows)
    blind = "their intervals know nothing of other seeds" if seeing else "nothing is known of other seeds"
    shared = sum(run.training.shared > 1 for run in runs)
    machines = sorted({run.environment.hardware for run in runs})
    sources = {run.environment.source for run in runs}
    unsafe = sorted({row.name for row in rows for d in ("float16", "bfloat16") if (f := row.drift(d)) and not f.finite})
    points = [point for speed in results.speeds for point in speed.rows]
    disturbed = sum(point.shared for point in points)
    untimed, failed = sum(bool(point.note) for point in points), len(results.failures)
    said = [
        (single, f"{single} of {len(rows)} rows rest on a single seed: {blind}."),
        (len(rows) > 2, MANY),
        (shared, f"{shared} of {len(runs)} trainings {SHARED}"),
        (len(machines) > 1, f"Trained on different machines: {listing(machines)}."),
        (len(sources) > 1, f"The runs come from {len(sources)} states of linvit's source; each names its own."),
        (any((run.environment.commit or "").endswith("+") for run in runs), UNCOMMITTED),
        (any(row.first.data.validation < 1000 for row in rows), SMALL),
        (unsafe, f"Not finite in half precision: {listing(unsafe)}."),
        (disturbed, f"{disturbed} of {len(points)} timings {DISTURBED}"),
        (contrary := astray(settings), contrary),
        (untimed, f"{untimed} timings are missing; the charts and the table say why."),
        (not points, "No speed was measured: latency, memory and exponents are empty."),
        (failed, f"{failed} job{'s' if failed > 1 else ''} failed, and what would have been measured is missing."),
    ]
    return [sentence for called_for, sentence in said if called_for] + results.notes


def astray(settings: Sequence[Setting]) -> str:
    """Where the times that were taken alone contradict the ratios."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for row in (row for setting in settings for row in setting.rows if not row.is_teacher):
        for ladder in row.ladders:
            how = f"{ladder.chip}, {ladder.what}{'' if ladder.many else ' of one image'}"
            found[how] |= {f"{row.name} at {size} px": max(f, 1 / f) - 1 for size, f in ladder.astray.items() if f > 0}
    said = []
    for how, apart in ((how, apart) for how, apart in found.items() if apart):
        names = listing(list(apart)) if len(apart) <= 5 else f"{len(apart)} timings"
        said.append(f"{how}: {names}, by up to {100 * max(apart.values()):.0f} %")
    return f"{ASTRAY} {'; '.join(said)}." if said else ""


def inferred(names: Iterable[str]) -> list[tuple[str, str]]:
    """(mechanisms, sentence) of what we inferred about those compared, from the mechanisms' own docstrings."""
    parts = [part for name in names for part in (("stella", "relu_quadratic") if name == "mixa" else (name,))]
    wanted = [part for part in dict.fromkeys(parts) if part in list_mechanisms()]
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
    made = [result.environment for result in [*trained, *results.speeds]]
    found = {words: {getattr(environment, name) for environment in made} - {None} for name, words in NAMES.items()}
    found["Data"] = {
        f"{d.name} ({d.train:,} train, {d.validation:,} validation), digest {d.digest}"
        for d in (run.data for run in trained)
        if d.train is not None
    }
    told = {words: sorted(map(str, values)) for words, values in found.items() if values}
    seeds = sorted({run.seed for run in results.runs})
    return {**told, "Seeds": [", ".join(map(str, seeds))]} if seeds else told
