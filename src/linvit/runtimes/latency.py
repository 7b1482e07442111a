"""`bench edge`: how long one image takes a model and its converted selves, in the runtimes that devices have.

Each model is exported and verified as `linvit.export` does it, or saved where PyTorch itself is the runtime, and opened
in a process of its own: what it peaks at is its own memory. The processes are asked by turns, so that whatever happens
to the machine meantime happens to all; a ratio is the median of the ratios within a turn. Beside the time stands the
CPU's own, which on a machine that does other work too says more: with one thread it is the time on a free core.

The plan `auto` is chosen by times in PyTorch. Here it is held against the original in each runtime, and where it is not
faster by 3 % the model is left as it is: a row with `same_as`.
"""

import copy
import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from linvit.conversion import find_hosts, save
from linvit.conversion.hub.fetching import CONFIG
from linvit.figures.edge import ratio
from linvit.measurement.model_speed import Convert, random_model
from linvit.measurement.record import source_digest
from linvit.measurement.speed import failure
from linvit.runtimes.exporting import export, find_target, picture_settings, size_of
from linvit.runtimes.photographs import photographs
from linvit.runtimes.process import Process
from linvit.runtimes.verifying import TOLERANCES, answers, compare, prepared

PYTORCH = ("eager", "compiled")
RUNTIMES = (*PYTORCH, "onnx", "openvino", "executorch")
ORIGINAL = "original"
KEY = ("resolution", "threads", "runtime", "attention")
WARM = 3  # calls before the clock starts
LEAST, MOST = 5, 200  # turns
VERIFIED = 2  # photographs
AUTO = "auto"
MARGIN = 0.97  # auto counts as faster when it takes less than this share of its original's time: clocks waver


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a row from the others of its file."""
    return tuple(row[name] for name in KEY)


def sweep(
    name: str,
    converts: Mapping[str, Convert],
    *,
    sizes: list[tuple[int, int]],
    threads: list[int],
    runtimes: tuple[str, ...],
    args: dict[str, Any],
    done: frozenset[tuple[Any, ...]] = frozenset(),
    budget: float = 3.0,
    files: Path | None = None,
) -> Iterator[dict[str, Any]]:
    """Rows as they are measured: for each size, runtime and number of threads the original, then its twins. Exports are
    kept in the folder `files`, and those that are there already are not made again."""
    for runtime in runtimes:
        if runtime not in PYTORCH:
            find_target(runtime).check("fp32", False)
    for size in sizes:
        pixels = size[0] if size[0] == size[1] else f"{size[0]}x{size[1]}"
        left: dict[str, list[list[dict[str, Any]]]] = {}
        for runtime, count in product(runtimes, threads):
            setting = {"resolution": pixels, "threads": count, "runtime": runtime}
            rows = [{**setting, "attention": attention} for attention in (ORIGINAL, *converts)]
            if any(key(row) not in done for row in rows):
                left.setdefault(runtime, []).append(rows)
        if not left:
            continue
        models = {ORIGINAL: random_model(name, size, args)}
        models |= {plan: random_model(name, size, args, convert) for plan, convert in converts.items()}
        for model in models.values():
            fill_vectors(model)
        images = prepared(models[ORIGINAL], photographs(1), picture_settings(models[ORIGINAL]), size)
        for groups in left.values():
            with TemporaryDirectory() as folder:
                for row in measure(groups, models, images, files or Path(folder), budget):
                    if key(row) not in done:  # of a group that was left half done all are timed again, for the ratios
                        yield row


def fill_vectors(model: nn.Module) -> None:
    """Biases and the scales of norms as training would leave them, not zero and one: runtimes leave out what does
    nothing."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for vector in (p for p in model.parameters() if p.ndim == 1):
            vector.add_(0.02 * torch.randn(vector.shape, generator=generator))


def measure(
    groups: list[list[dict[str, Any]]], models: Mapping[str, nn.Module], images: Tensor, folder: Path, budget: float
) -> Iterator[dict[str, Any]]:
    """The rows of one size in one runtime: the files first, then for each number of threads the times by turns."""
    files: dict[str, Path | Exception] = {}
    for row in groups[0]:
        try:
            files[row["attention"]] = write(models[row["attention"]], row, (images.shape[2], images.shape[3]), folder)
        except Exception as error:  # one that cannot be exported must not cost the others
            files[row["attention"]] = error
    for rows in groups:
        for row in rows:
            if isinstance(file := files[row["attention"]], Exception):
                row |= failure(file)
        written = {attention: path for attention, path in files.items() if isinstance(path, Path)}
        time_together([row for row in rows if row["attention"] in written], models, images, written, budget)
        yield from rows


def write(model: nn.Module, row: dict[str, Any], size: tuple[int, int], folder: Path) -> Path:
    """The model as the runtime opens it for images of this size, verified where it is a file of another, under a name
    that tells which model by which source it is."""
    runtime, described = row["runtime"], f"{model} {row['attention']} {row['resolution']} {source_digest()}"
    stem = folder / f"{type(model).__name__}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"
    if runtime in PYTORCH:
        if not (stem / CONFIG).exists():
            save(model, stem)
        return stem
    path = stem.with_suffix(find_target(runtime).suffix)
    if not Path(f"{path}.json").exists():
        export(model, runtime, path, size=size, count=VERIFIED)
    return path


def time_together(
    rows: list[dict[str, Any]], models: Mapping[str, nn.Module], images: Tensor, files: dict[str, Path], budget: float
) -> None:
    """Fill rows of one setting with their times."""
    array = images.numpy()
    with ExitStack() as stack:
        opened: list[tuple[dict[str, Any], Process]] = []
        for row in rows:
            how = row["runtime"] if row["runtime"] in PYTORCH else ""
            path = files[row["attention"]]
            try:
                process = stack.enter_context(Process(path, threads=row["threads"], how=how))
                found = [torch.from_numpy(part) for part in process.run(array)]
                check = compare(
                    answers(models[row["attention"]].eval(), images), found, (images.shape[2], images.shape[3])
                )
                right = check.relative <= TOLERANCES["fp32"]
                row |= {"status": "ok" if right else "wrong", "error": min(check.relative, 1e30)}
                row["file_bytes"] = sum(p.stat().st_size for p in path.iterdir()) if path.is_dir() else size_of(path)
                if right:
                    opened.append((row, process))
            except Exception as error:
                row |= failure(error)
        fill_times(opened, array, budget)
    for row in rows:
        if row["status"] == "ok" and row["runtime"] == "eager":
            row["layers"] = layer_times(models[row["attention"]], images, row["threads"])


def fill_times(opened: list[tuple[dict[str, Any], Process]], images: Any, budget: float) -> None:
    """Times and ratios of rows whose models are opened; the original, if it is there, is the first."""
    turns = by_turns([process for _, process in opened], images, budget) if opened else []
    for place, (row, process) in enumerate(opened):
        row["peak_bytes"] = process.timed(images, 1)["peak_bytes"]
        row["ms"], row["cpu_ms"] = (spread([turn[place][i] * 1e3 for turn in turns]) for i in (0, 1))
        original = opened[0][0]
        if original["attention"] == ORIGINAL:
            row["ratio"], row["cpu_ratio"] = (median(turn[0][i] / turn[place][i] for turn in turns) for i in (0, 1))
            if row["attention"].partition(":")[0] == AUTO and ratio(row) * MARGIN <= 1:
                row |= {k: v for k, v in original.items() if k not in KEY} | {"same_as": ORIGINAL}


def by_turns(processes: list[Process], images: Any, budget: float) -> list[list[tuple[float, float]]]:
    """Seconds and CPU seconds of a call of each, turn after turn: of a short burst the best, for the first after
    another's is slow."""
    once = sum(min(process.timed(images, WARM)["seconds"]) for process in processes) / len(processes)
    burst = 3 if once < 0.2 else 2
    count = max(LEAST, min(MOST, int(budget / (burst * once))))

    def best(process: Process) -> tuple[float, float]:
        found = process.timed(images, burst)
        return min(found["seconds"][1:]), min(found["cpu_seconds"][1:])

    return [[best(process) for process in processes] for _ in range(count)]


def spread(samples: list[float]) -> dict[str, float]:
    tenths = quantiles(samples, n=10, method="inclusive")
    return {"p50": median(samples), "p90": tenths[8], "turns": len(samples)}


def layer_times(model: nn.Module, images: Tensor, threads: int, calls: int = 5) -> dict[str, Any]:
    """Milliseconds of each attention layer in PyTorch: all of it, and without its projections and norms, which is the
    mechanism; and of the whole model, watched the same way."""
    twin = copy.deepcopy(model).eval()
    hosts = dict(find_hosts(twin))
    spent: dict[str, float] = {}
    starts: dict[int, float] = {}

    def begin(module: nn.Module, _: Any) -> None:
        starts[id(module)] = time.perf_counter()

    def end(name: str) -> Any:
        def hook(module: nn.Module, _: Any, __: Any) -> None:
            spent[name] = spent.get(name, 0.0) + time.perf_counter() - starts[id(module)]

        return hook

    for name, host in hosts.items():
        host.register_forward_pre_hook(begin)
        host.register_forward_hook(end(f"{name}|all"))
        for part, child in host.named_children():
            if part != "mechanism":
                child.register_forward_pre_hook(begin)
                child.register_forward_hook(end(f"{name}|around"))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            twin(images)
            spent.clear()
            start = time.perf_counter()
            for _ in range(calls):
                twin(images)
            whole = time.perf_counter() - start
    finally:
        torch.set_num_threads(before)
    scale = 1e3 / calls
    return {
        "model_ms": whole * scale,
        "attention": [
            {
                "name": name,
                "ms": spent[f"{name}|all"] * scale,
                "mechanism_ms": (spent[f"{name}|all"] - spent.get(f"{name}|around", 0.0)) * scale,
            }
            for name in hosts
            if f"{name}|all" in spent
        ],
    }


def share(row: dict[str, Any], which: str = "mechanism_ms") -> float | None:
    """How much of the model's time attention takes, where it was looked at layer by layer."""
    if "layers" not in row:
        return None
    return sum(layer[which] for layer in row["layers"]["attention"]) / row["layers"]["model_ms"]
