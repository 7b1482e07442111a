"""A store as `linvit compare` would leave it, with plausible numbers and no training: the report's test material."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from linvit.comparison.reporting import Contents
from linvit.comparison.statistics.rows import CandidateRow

# name: accuracy against softmax, milliseconds of fixed cost, of linear and of quadratic cost
MECHANISMS: dict[str, tuple[float, float, float, float]] = {
    "softmax": (0.0, 2.0, 1.0, 0.9),
    "stella": (-0.6, 2.1, 1.05, 0.0),
    "qt": (0.2, 2.6, 1.35, 0.0),
    "castling": (0.4, 3.0, 1.5, 0.0),
    "mobile": (-0.2, 2.9, 1.6, 0.0),
    "mixa:keep=2": (-0.1, 2.1, 1.0, 0.3),
    "efficient": (-1.3, 2.2, 1.2, 0.0),
    "linformer": (-2.1, 2.1, 1.1, 0.1),
    "performer": (-2.6, 2.8, 1.7, 0.0),
    "fastformer": (-3.6, 2.0, 0.95, 0.0),
    "xca": (-2.4, 2.1, 1.1, 0.0),
    "xca:variant=fair,lpi=true": (0.1, 2.4, 1.25, 0.0),
    "window": (-1.2, 2.3, 1.3, 0.0),
    "hydra": (-5.2, 1.9, 0.9, 0.0),
    "focused": (0.3, 3.1, 1.7, 0.0),
}
CHIPS = {"cuda": ("NVIDIA H200", 1.0), "cpu": ("AMD EPYC 9654 96-Core Processor, 16 cores", 40.0)}
IMAGES = 2000
USUAL = (0.0, 2.0, 1.0, 0.0)  # what a mechanism that is not in the list does
MEMORY = 120e9


def write_store(
    folder: Path,
    *,
    mode: str = "scratch",
    mechanisms: Sequence[str] = tuple(MECHANISMS),
    seeds: Sequence[int] = (0, 1, 2),
    patches: Sequence[int] = (4, 8),
    seeds_of_others: Sequence[int] = (0,),
    epochs: int = 30,
    sizes: Sequence[int] = (64, 128, 256, 512),
    devices: Sequence[str] = ("cpu", "cuda"),
    failures: bool = True,
    teacher_seed: int = 0,
) -> Path:
    """`seeds` at the first patch size, `seeds_of_others` at the rest. In mode distil each patch has its teacher."""
    for patch in patches:
        base = 88.0 - 1.1 * (patch - 4)
        teacher: Any = None
        if mode == "distil":
            made = run("softmax", patch, teacher_seed, mode, epochs, base + 1, None, kind="teacher")
            write(folder / "runs" / f"{made['key']}.json", made)
            teacher = {"key": made["key"], "identity": made["identity"]}
        for name in mechanisms:
            for seed in seeds if patch == patches[0] else seeds_of_others:
                made = run(name, patch, seed, mode, epochs, base + MECHANISMS.get(name, USUAL)[0], teacher)
                write(folder / "runs" / f"{made['key']}.json", made)
            timed = speed(name, patch, sizes, devices)
            write(folder / "speeds" / f"{timed['key']}-h200.json", timed)
    if failures:
        label = {"candidate": "inline", "mechanism": "inline", "patch": 4, "size": 128, "seed": 1, "mode": mode}
        failed = {"kind": "failure", "version": 1, "key": digest(["inline", mode]), "label": label}
        failed |= {"identity": identity_of("inline", 4, mode, epochs, 1, None), "candidate_key": "0" * 16}
        text = "CUDA out of memory. Tried to allocate 2.50 GiB"
        failed |= {"error": text, "traceback": f"Traceback (most recent call last):\n  …\nRuntimeError: {text}"}
        write(folder / "failures" / f"{failed['key']}-1.json", {**failed, "environment": environment(), "attempt": 1})
    return folder


def write(path: Path, data: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, allow_nan=False))


def label_of(name: str, patch: int, mode: str) -> dict[str, Any]:
    paper = {"stella": "MixA", "mixa": "MixA", "qt": "QT-ViT"}.get(name.partition(":")[0], "")
    return {
        "candidate": name,
        "mechanism": name.partition(":")[0],
        "paper": paper,
        "patch": patch,
        "size": 128,
        "mode": mode,
    }


def run(
    name: str, patch: int, seed: int, mode: str, epochs: int, goal: float, teacher: Any, kind: str = "run"
) -> dict[str, Any]:
    identity = identity_of(name, patch, mode, epochs, seed, teacher, kind)
    noise = np.random.default_rng(int(digest([name, patch, seed, mode, kind]), 16))
    pictures = np.random.default_rng(7).random(IMAGES)  # how hard each image is, the same for all
    right = pictures * 100 + noise.normal(0, 6, IMAGES) < goal + noise.normal(0, 0.2)
    top1 = round(100 * float(right.mean()), 4)
    curve = []
    for epoch in range(1, epochs + 1):
        grown = top1 * (1 - math.exp(-4.2 * epoch / epochs)) / (1 - math.exp(-4.2)) + noise.normal(0, 0.5)
        curve.append(
            {"epoch": float(epoch), "top1": round(grown, 2), "loss": round(2.4 - grown / 50, 4), "seconds": 4.1 * epoch}
        )
    curve[-1]["top1"] = top1
    made: dict[str, Any] = {
        "kind": kind,
        "version": 1,
        "key": digest([identity, kind]),
        "candidate_key": candidate_key(name, patch),
        "label": {**label_of(name, patch, mode), "seed": seed},
        "identity": identity,
        "command": f"linvit compare imagenette -o store --only {digest([identity, kind])}",
        "environment": environment(),
        "data": {"name": "imagenette", "digest": "9f31c0de55aa10f2", "train": 9469, "validation": IMAGES},
        "model": {
            "parameters": 1_700_000 + 40_000 * len(name),
            "macs": int(macs(name, patch)),
            "tokens": (128 // patch) ** 2,
        },
        "accuracy": {
            "epochs": curve,
            "top1": top1,
            "top5": min(100.0, top1 + 9),
            "best": max(point["top1"] for point in curve),
            "standard_error": math.sqrt(top1 * (100 - top1) / IMAGES),
            "loss": 0.45,
            "correct": base64.b64encode(np.packbits(right).tobytes()).decode(),
        },
        "training": {
            "seconds": 4.1 * epochs * macs(name, patch) / 2e8,
            "images_per_second": 9e11 / macs(name, patch),
            "peak_bytes": int(macs(name, patch) * 12),
            "device": "cuda",
            "shared": 3,
        },
        "drift": [
            {"dtype": "float16", "relative_rms": 0.0011, "agreement": 99.8, "finite": name != "performer"},
            {"dtype": "bfloat16", "relative_rms": 0.0087, "agreement": 99.1, "finite": True},
        ],
        "seconds": 4.4 * epochs,
    }
    if mode == "distil" and kind == "run":
        made["conversion"] = {
            "zero_shot": max(10.0, 40 + 9 * MECHANISMS.get(name, USUAL)[0] + noise.normal(0, 2)),
            "teacher_top1": 89.0,
            "agreement": 92.0,
            "kl": 0.08,
            "report": "12 of 12 hosts converted",
        }
    return made


def macs(name: str, patch: int, size: int = 128) -> float:
    _, _, linear, quadratic = MECHANISMS.get(name, USUAL)
    tokens = (size / patch) ** 2
    return 1.5e5 * tokens * (linear + quadratic * tokens / 1000)


def speed(name: str, patch: int, sizes: Sequence[int], devices: Sequence[str]) -> dict[str, Any]:
    rows = []
    for device in devices:
        for size in sizes:
            for batch in (1, 64):
                for what in ("inference", "training") if batch > 1 else ("inference",):
                    rows.append(timing(name, patch, size, device, batch, what))
    identity = {
        "kind": "speed",
        **structure(name, patch),
        "ladder": list(sizes),
        "batch": 64,
        "precision": "bf16",
        "compile": False,
        "devices": list(devices),
    }
    return {
        "kind": "speed",
        "version": 1,
        "key": digest(identity),
        "candidate_key": candidate_key(name, patch),
        "label": label_of(name, patch, "scratch"),
        "identity": identity,
        "command": f"linvit compare imagenette -o store --only {digest(identity)}",
        "environment": environment(),
        "rows": rows,
        "seconds": 60.0,
    }


def timing(name: str, patch: int, size: int, device: str, batch: int, what: str) -> dict[str, Any]:
    slow = CHIPS[device][1] * (3 if what == "training" else 1)

    def median(name: str) -> float:
        return slow * (2 + MECHANISMS.get(name, USUAL)[1] * 0.05 + batch * macs(name, patch, size) / 1e9)

    def held(name: str) -> int:
        return int(4e7 + batch * macs(name, patch, size) * (0.6 if what == "inference" else 4))

    taken, fits = median(name), held(name) < MEMORY
    return {
        "device": device,
        "size": size,
        "tokens": (size // patch) ** 2,
        "batch": batch,
        "pass": what,
        "precision": "bf16",
        "compiled": False,
        "cuda_graph": device == "cuda",
        "milliseconds": {"median": taken, "low": 0.97 * taken, "high": 1.06 * taken} if fits else None,
        "images_per_second": 1000 * batch / taken if fits else None,
        "peak_bytes": held(name) if fits and device == "cuda" else None,
        "ratio": median("softmax") / taken if fits and held("softmax") < MEMORY else None,
        "note": None if fits else "out of memory",
    }


def identity_of(
    name: str, patch: int, mode: str, epochs: int, seed: int, teacher: Any, kind: str = "run"
) -> dict[str, Any]:
    config = {"recipe": "deit", "seed": seed, "epochs": epochs, "lr": 1e-3, "batch_size": 256, "weight_decay": 0.05}
    return {
        "kind": kind,
        "mode": mode,
        **structure(name, patch),
        "data": {"name": "imagenette", "digest": "9f31c0de55aa10f2"},
        "config": config,
        "seed": seed,
        "teacher": teacher,
    }


def structure(name: str, patch: int) -> dict[str, Any]:
    candidate = {"name": name, "options": {}}
    return {
        "architecture": architecture(),
        "classes": 10,
        "candidate": candidate,
        "patch_size": patch,
        "size": 128,
    }


def architecture() -> dict[str, Any]:
    return {"model": "fair", "width": 32, "depths": [2, 2, 6, 2]}


def environment() -> dict[str, Any]:
    return {
        "hardware": CHIPS["cuda"][0],
        "cpu": CHIPS["cpu"][0],
        "threads": 16,
        "python": "3.11.9",
        "torch": "2.15.0",
        "triton": "3.9.0",
        "cuda": "13.0",
        "timm": "1.0.30",
        "linvit": "0.1.0",
        "commit": "0123456789abcdef",
        "source": "aa11bb22cc33dd44",
        "command": "linvit compare imagenette -o store",
        "time": "2026-11-15T09:00:00+00:00",
        "packages": {"torch": "2.15.0", "torchvision": "0.30.0", "timm": "1.0.30", "numpy": "2.3.1"},
    }


def candidate_key(name: str, patch: int) -> str:
    return digest([architecture(), name, patch, 128])


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def row_of(contents: Contents, name: str, patch: int = 4) -> CandidateRow:
    """A candidate's row in the first setting."""
    found = [row for row in contents.settings[0].rows if row.name == name and row.label.patch == patch]
    assert len(found) == 1
    return found[0]
