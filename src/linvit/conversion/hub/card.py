"""The model card: what a saved model is, where it comes from and what was measured of it, from its own files.

Beside a model's folder lies what its training and measurements left: `run.json`, `log.jsonl`, result files of
`linvit bench`. What is not there is not told.
"""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from linvit.conversion.report import Conversion
from linvit.conversion.saving import SavedConfig, read_config
from linvit.errors import LinvitError
from linvit.files import read_json

METRICS = {  # what logs call them, what one reads, and what the hub calls them, if it knows such
    "top1": ("top-1 accuracy, %", "accuracy"),
    "top5": ("top-5 accuracy, %", "top_5_accuracy"),
    "map": ("mAP", "mean_average_precision"),
    "ap": ("AP", "mean_average_precision"),
    "miou": ("mIoU, %", "mean_iou"),
    "knn": ("kNN accuracy, %", "accuracy"),
    "probe": ("probe accuracy, %", "accuracy"),
    "patch_cosine": ("patch cosine with the original", ""),
    "class_cosine": ("class cosine with the original", ""),
    "neighbours": ("nearest neighbour as the original's, %", ""),
}
BEST = ("cosine", *METRICS)  # by the first that a log has, its best model was chosen
TAGS = {"faster_rcnn": "object-detection", "mask_rcnn": "object-detection", "retinanet": "object-detection"}


def model_card(folder: str | Path, repo: str = "user/name", bench: Iterable[str | Path] = ()) -> str:
    """The card of a saved model, as Markdown with YAML before it. `bench` are result files of `linvit bench`, beside
    those that lie in the folder or in the run's."""
    folder = Path(folder)
    config = read_config(folder)
    done = [Conversion.from_dict(conversion) for conversion in config.conversions]
    run, log = run_of(folder)
    speeds = [row for file in bench_files(folder, bench) for row in speed_rows(file, config)]
    sections = [
        front_matter(config, done, run, log, repo),
        f"# {repo.rpartition('/')[2]}\n\n{summary(config, done)}",
        f"## How to load it\n\n{usage(config, repo)}",
        section("Attention", attention(config, done)),
        section("Training", training(run, done)),
        section("What was measured", measured(log, original_log(done))),
        section("Speed against the original", speeds_table(speeds)),
    ]
    return "\n\n".join(part for part in sections if part) + "\n"


def section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if text else ""


def front_matter(config: SavedConfig, done: list[Conversion], run: dict[str, Any], log: list[Any], repo: str) -> str:
    """What the hub reads: libraries, task, the model it was made from, data and results."""
    lines = ["---", "library_name: linvit", "tags:", *(f"- {tag}" for tag in ("linvit", "linear-attention", "vision"))]
    lines.append(f"pipeline_tag: {task_of(config)}")
    base = base_model(done)
    lines += [f"base_model: {quoted(base)}"] if base else []
    data = [entry["name"] for entry in run.get("sets", ()) if isinstance(entry, dict) and entry.get("name")]
    evals = [record for record in log if record.get("kind") == "eval"]
    last = evals[-1] if evals else {}
    found = {key: last[key] for key, (_, known) in METRICS.items() if known and isinstance(last.get(key), float | int)}
    if found:
        lines += ["model-index:", f"- name: {quoted(repo.rpartition('/')[2])}", "  results:", "  - task:"]
        lines += [f"      type: {task_of(config)}", "    dataset:", f"      name: {quoted(data[-1] if data else '?')}"]
        lines += [f"      type: {quoted(data[-1] if data else '?')}", "    metrics:"]
        for key, value in found.items():
            said, known = METRICS[key]
            lines += [f"    - type: {known}", f"      name: {quoted(said)}", f"      value: {value:.4g}"]
    return "\n".join([*lines, "---"])


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def task_of(config: SavedConfig) -> str:
    if config.model in TAGS:
        return TAGS[config.model]
    if config.model in ("upernet", "semantic_fpn", "segmenter", "mask2former") or "Segmentation" in config.model:
        return "image-segmentation"
    classifies = config.classes or "Classification" in config.model or not config.model.startswith("transformers:")
    return "image-classification" if classifies and config.args.get("num_classes") != 0 else "image-feature-extraction"


def base_model(done: list[Conversion]) -> str:
    """The hub's name of the original, where it has one."""
    named = done[0].source.model if done and done[0].source else ""
    return named.removeprefix("hf-hub:").partition("@")[0] if named.startswith("hf-hub:") else ""


def summary(config: SavedConfig, done: list[Conversion]) -> str:
    name = config.model.removeprefix("transformers:")
    library = "Hugging Face's" if name != config.model else "timm's"
    plans = ", then ".join(f"plan `{one.plan.name}`" for one in done)
    size = config.preprocessing.get("input_size")
    pixels = f" Images are {size[1]}×{size[2]}." if size else ""
    made = f" whose attention was converted by {plans} of" if done else ", saved by"
    classes = f" It tells {len(config.classes)} classes apart." if config.classes else ""
    return f"{library} `{name}`{made} linvit {config.linvit}.{pixels}{classes}"


def usage(config: SavedConfig, repo: str) -> str:
    lines = ["```python", "import linvit", "", f'model = linvit.load("hf-hub:{repo}")', "```", "", "or, in a shell,"]
    lines += ["", f"    linvit predict hf-hub:{repo} photograph.jpg" if config.classes else ""]
    lines = lines if config.classes else lines[:5]
    if config.model_type:
        auto = "AutoModelForImageClassification" if "Classification" in config.model else "AutoModel"
        lines += ["", "With transformers' own classes:", "", "```python"]
        lines += ["from linvit.conversion import register_auto_classes"]
        lines += [
            f"from transformers import {auto}",
            "",
            "register_auto_classes()",
            f'model = {auto}.from_pretrained("{repo}")',
            "```",
        ]
    return "\n".join(lines)


def attention(config: SavedConfig, done: list[Conversion]) -> str:
    """Which mechanisms there are, and what was given up."""
    if not config.layers:
        return ""
    lines = ["| mechanism | layers |", "|---|---:|"]
    told = Counter(layer.mechanism + options(layer.options) for layer in config.layers)
    lines += [f"| `{name}` | {count} |" for name, count in told.items()]
    gone = Counter(feature for layer in config.layers for feature in layer.dropped)
    if gone:
        lost = ", ".join(f"{feature} in {count} layers" for feature, count in gone.items())
        lines += ["", f"Given up: {lost}."]
    plans = [json.dumps(one.plan.to_dict(), ensure_ascii=False) for one in done]
    lines += ["", "<details><summary>The plan</summary>", "", "```json", *plans, "```", "", "</details>"]
    return "\n".join(lines)


def options(given: dict[str, Any]) -> str:
    return "(" + ", ".join(f"{name}={value}" for name, value in given.items()) + ")" if given else ""


def run_of(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What the training that a model is from left beside it: the run's record, and its log up to this model."""
    for place in (folder, folder.parent):
        run = read_json(place / "run.json")
        if isinstance(run, dict) and run.get("kind") == "training":
            return run, read_log(place / "log.jsonl", best=folder.name == "best")
    return {}, []


def read_log(path: Path, *, best: bool = False) -> list[dict[str, Any]]:
    """The records of a log, for the best model only those up to it."""
    records = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        records += [record] if isinstance(record, dict) else []
    evals = [record for record in records if record.get("kind") == "eval"]
    if best and evals:
        known = next((key for key in BEST if key in evals[-1]), None)
        top = max(evals, key=lambda record: record.get(known, -1.0)) if known else evals[-1]
        records = records[: records.index(top) + 1]
    return records


def training(run: dict[str, Any], done: list[Conversion]) -> str:
    if not run:
        return ""
    config, places = run.get("config") or {}, run.get("environment") or {}
    sets = [entry for entry in run.get("sets") or () if isinstance(entry, dict)]
    names = ("trained on", "validated on")
    lines = [f"- {said} {entry['name']}, {entry['images']:,} images" for said, entry in zip(names, sets, strict=False)]
    lines.append(f"- recipe `{config.get('recipe')}`, {config.get('epochs', 0):g} epochs, seed {config.get('seed')}")
    source = done[0].source if done else None
    teacher = run.get("teacher") or config.get("teacher")
    taught = any(stage.get("objective") != "supervised" for stage in config.get("stages") or ())
    if not teacher and (taught or config.get("distillation") not in (None, "none")):
        teacher = "the original" + (f", {source.model}" if source and source.model else "")
    lines += [f"- teacher: {teacher}"] if teacher else []
    lines += [f"- on {places.get('hardware')}, PyTorch {places.get('torch')}"] if places else []
    if places.get("command"):
        lines += ["", f"    {places['command']}"]
    return "\n".join(lines)


def original_log(done: list[Conversion]) -> list[dict[str, Any]]:
    """The log of the run that the original is from, where it is still there."""
    source = done[0].source if done else None
    return run_of(Path(source.folder))[1] if source and source.folder and Path(source.folder).is_dir() else []


def measured(log: list[dict[str, Any]], before: list[dict[str, Any]]) -> str:
    """The metrics of the original, as far as they are known, and of the model before and after its training."""
    evals, originals = ([r for r in records if r.get("kind") == "eval"] for records in (log, before))
    if not evals:
        return ""
    first, last, original = evals[0], evals[-1], originals[-1] if originals else {}
    rows = []
    for key, (said, _) in METRICS.items():
        if isinstance(last.get(key), float | int):
            places = 4 if key.endswith("cosine") else 2
            begun = first.get(key) if first["step"] == 0 else None
            known = last.get(f"teacher_{key}", original.get(key))
            earlier = ("–" if value is None else f"{value:.{places}f}" for value in (known, begun))
            error = last.get("standard_error") if key == "top1" else None
            after = f"{last[key]:.{places}f}{f' ± {error:.2f}' if error else ''}"
            rows.append(f"| {said} | {' | '.join(earlier)} | {after} |")
    head = [f"| on the validation set | original | converted | after {last['step']:,} steps |", "|---|---:|---:|---:|"]
    return "\n".join([*head, *rows]) if rows else ""


def bench_files(folder: Path, given: Iterable[str | Path]) -> list[Path]:
    """The result files of `linvit bench` that are given, and those that lie beside the model."""
    files = [Path(file) for file in given]
    for file in files:
        if not is_bench(file):
            raise LinvitError(f"{file} is no result file of linvit bench")
    found = (file for place in (folder, folder.parent) for file in sorted(place.glob("*.json")))
    return [*files, *(file for file in found if file not in files and is_bench(file))]


def is_bench(file: Path) -> bool:
    data = read_json(file)
    return isinstance(data, dict) and data.get("kind") in ("bench model", "bench edge") and bool(data.get("rows"))


def speed_rows(file: Path, config: SavedConfig) -> list[tuple[str, ...]]:
    """The rows of a result file: where, at which size, how much faster than softmax."""
    data: dict[str, Any] = read_json(file)
    if data.get("model") != config.model:
        return []
    rows: list[tuple[str, ...]] = []
    softmax: dict[Any, float] = {}
    where = data.get("environment", {}).get("hardware", "")
    for row in data["rows"]:
        if row.get("status") != "ok":
            continue
        how = row.get("runtime") or f"{row.get('pass')}, {row.get('mode')}"
        key = (row["resolution"], row.get("batch", 1), how)
        time = row["ms"].get("median", row["ms"].get("p50"))
        if row["attention"] == "softmax":
            softmax[key] = time
        elif key in softmax:
            to = data.get("to") if row["attention"] == "converted" else row["attention"]
            rows.append((str(to), where, f"{key[0]}", f"{key[1]}", how, f"{softmax[key] / time:.2f}×"))
    return rows


def speeds_table(rows: list[tuple[str, ...]]) -> str:
    if not rows:
        return ""
    head = ["| plan | hardware | pixels | batch | how | speed |", "|---|---|---:|---:|---|---:|"]
    return "\n".join([*head, *("| " + " | ".join(row) + " |" for row in rows)])
