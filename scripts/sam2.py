"""SAM 2's Hiera-T with its published weights: is a converted encoder as good to SAM 2's own mask decoder?

    python -m scripts.sam2 save WEIGHTS hiera                timm's model with them, a folder for `linvit train`
    python -m scripts.sam2 photographs voc256.tar photos     its images as photos/train and photos/val, without labels
    python -m scripts.sam2 align WEIGHTS hiera photos runs/sam2 --minutes 9
    python -m scripts.sam2 judge WEIGHTS hiera runs/sam2/final/last … --data voc256.tar -o FILE.json

WEIGHTS has `sam2_hiera_tiny.safetensors` (or `.fp16`), `sam2_hiera_tiny_neck.safetensors` and
`sam2_hiera_tiny_decoder.onnx`. Each object of the validation images prompts the decoder with its box; of the three
masks it gives, the one it thinks best is taken. The student's mask is held against the original's and, like the
original's, against the truth: the pixels of the object's class inside its box, where no other box of that class
overlaps it. Beside the masks stand the cosines of the maps that the neck reads.

`align` converts the three global layers and trains for so many minutes: `align` and `blocks` of the recipe `fast`
first, then `final` for as many epochs as fit, found from the speed so far, so that the rate falls to its end in time.
Stage 3 and what the neck makes of the maps for the decoder are learnt beside stage 4. Killed, the same command goes on.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import onnxruntime
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import linvit
from linvit.files import read_json, write_json
from linvit.measurement.record import environment
from linvit.training.logs import read_log

SIZE = 1024
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
IGNORED = 255
PLAN = "linear_window:window=16,keep=[0,1,2,3,4,6,8,10,11]"
BEHIND = r"blocks\.([5-9]|1[01])\."  # from the first global layer on
SETTINGS = (
    *("batch_size=16", "crop_scale=0.5,1", "log_steps=10", "eval_epochs=10", "stages.blocks.fit=32"),
    *(f"stages.{stage}.trainable={BEHIND}" for stage in ("blocks", "final")),
    "stages.final.lr=5e-5",
)
RESERVE = 60  # seconds for compiling anew, evaluations and checkpoints


@dataclass(frozen=True)
class Photograph:
    """An image of 0 … 255 (height, width, 3), its class mask, and each judged object's class and box (x, y, x, y)."""

    pixels: np.ndarray
    mask: np.ndarray
    objects: list[tuple[int, tuple[float, float, float, float]]]


@cache
def members(archive: Path) -> dict[str, bytes]:
    with tarfile.open(archive) as tar:
        return {each.name.partition("/")[2]: tar.extractfile(each).read() for each in tar if each.isfile()}  # type: ignore[union-attr]


def overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return max(one[0], other[0]) < min(one[2], other[2]) and max(one[1], other[1]) < min(one[3], other[3])


def photographs(archive: Path, split: str = "val") -> Iterator[Photograph]:
    """Images with at least one object that no other of its class overlaps."""
    files = members(archive)
    annotations = json.loads(files[f"annotations/{split}.json"])
    names = {image["id"]: image["file_name"] for image in annotations["images"]}
    boxes: dict[int, list[tuple[int, tuple[float, float, float, float]]]] = {}
    for each in annotations["annotations"]:
        x, y, width, height = each["bbox"]
        boxes.setdefault(each["image_id"], []).append((each["category_id"], (x, y, x + width, y + height)))
    for image, found in boxes.items():
        kept = [
            (label, box)
            for place, (label, box) in enumerate(found)
            if not any(label == its and overlap(box, b) for other, (its, b) in enumerate(found) if other != place)
        ]
        if kept:
            name = Path(names[image]).stem
            pixels = np.array(Image.open(io.BytesIO(files[f"images/{split}/{name}.jpg"])).convert("RGB"))
            yield Photograph(pixels, np.array(Image.open(io.BytesIO(files[f"masks/{split}/{name}.png"]))), kept)


class Neck:
    """SAM 2's neck: what the decoder reads, from the four maps of an encoder."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        weights = load_file(folder / "sam2_hiera_tiny_neck.safetensors", device=str(device))
        self.weights = {name: tensor.float() for name, tensor in weights.items()}

    def conv(self, name: str, x: Tensor) -> Tensor:
        return functional.conv2d(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def level(self, index: int, x: Tensor) -> Tensor:
        return self.conv(f"image_encoder.neck.convs.{index}.conv", x)

    def embedding(self, maps: list[Tensor]) -> Tensor:
        """Of stage 3 and, at twice its size, stage 4."""
        coarse = self.level(0, maps[3])[:, :, :, None, :, None].expand(-1, -1, -1, 2, -1, 2).flatten(4).flatten(2, 3)
        return self.level(1, maps[2]) + coarse + self.weights["no_mem_embed"].reshape(1, -1, 1, 1)

    def finer(self, maps: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Of stages 1 and 2."""
        fine, coarse = self.level(3, maps[0]), self.level(2, maps[1])
        return self.conv("sam_mask_decoder.conv_s0", fine), self.conv("sam_mask_decoder.conv_s1", coarse)

    def read(self, maps: list[Tensor]) -> list[Tensor]:
        """What is aligned: stages 1 and 2 lie before all that is converted."""
        return [maps[2], self.embedding(maps)]


class Reader:
    """SAM 2's neck and decoder: masks from the four maps of an encoder."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.neck = Neck(folder, device)
        self.decoder = onnxruntime.InferenceSession(str(folder / "sam2_hiera_tiny_decoder.onnx"))

    def masks(self, maps: list[Tensor], photograph: Photograph) -> np.ndarray:
        """(objects, height, width), true where the object is."""
        high, width = photograph.pixels.shape[:2]
        scale = np.array([SIZE / width, SIZE / high] * 2, np.float32)
        corners = np.array([box for _, box in photograph.objects], np.float32) * scale
        finest, fine = self.neck.finer(maps)
        given = {
            "image_embed": self.neck.embedding(maps),
            "high_res_feats_0": finest,
            "high_res_feats_1": fine,
            "point_coords": torch.from_numpy(corners.reshape(-1, 2, 2)),
            "point_labels": torch.tensor([[2.0, 3.0]]).repeat(len(corners), 1),
            "mask_input": torch.zeros(len(corners), 1, 256, 256),
            "has_mask_input": torch.zeros(1),
        }
        found, scores = self.decoder.run(None, {name: each.cpu().numpy() for name, each in given.items()})
        best = torch.from_numpy(found[np.arange(len(found)), scores.argmax(1)])[:, None]
        whole: np.ndarray = functional.interpolate(best, (high, width), mode="bilinear")[:, 0].gt(0).numpy()
        return whole


def iou(one: np.ndarray, other: np.ndarray) -> float:
    union = (one | other).sum()
    return float((one & other).sum() / union) if union else 1.0


def truths(photograph: Photograph) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each object its pixels, and which pixels are judged."""
    found = []
    for label, (left, top, right, bottom) in photograph.objects:
        inside = np.zeros(photograph.mask.shape, bool)
        inside[round(top) : round(bottom) + 1, round(left) : round(right) + 1] = True
        found.append((inside & (photograph.mask == label), photograph.mask != IGNORED))
    return found


def encoded(model: nn.Module, photograph: Photograph, device: torch.device) -> list[Tensor]:
    x = torch.from_numpy(photograph.pixels).to(device).permute(2, 0, 1)[None].float() / 255
    x = functional.interpolate(x, (SIZE, SIZE), mode="bilinear", antialias=True)
    x = (x - x.new_tensor(MEAN).reshape(1, 3, 1, 1)) / x.new_tensor(STD).reshape(1, 3, 1, 1)
    maps: list[Tensor] = model.forward_intermediates(x, intermediates_only=True)  # type: ignore[operator]
    return [each.float() for each in maps]


def judge(
    weights: Path, original: Path, students: list[Path], data: Path, limit: int | None, device: torch.device
) -> dict[str, Any]:
    """Of the original its IoU with the truth; of each student that, the IoU with the original's masks, the cosines."""
    reader = Reader(weights, device)
    models = {path: linvit.load(path).to(device).eval() for path in (original, *students)}
    rows: dict[Path, dict[str, list[float]]] = {path: {} for path in models}

    def note(path: Path, metric: str, value: float) -> None:
        rows[path].setdefault(metric, []).append(value)

    for count, photograph in enumerate(photographs(data)):
        if limit is not None and count >= limit:
            break
        theirs: list[Tensor] = []
        their_masks = np.zeros(0)
        truth = truths(photograph)
        for path, model in models.items():
            with torch.inference_mode():
                maps = encoded(model, photograph, device)
                masks = reader.masks(maps, photograph)
            for mine, (right, judged) in zip(masks, truth, strict=True):
                note(path, "truth_iou", iou(mine & judged, right & judged))
            if path == original:
                theirs, their_masks = maps, masks
                continue
            for mine, other in zip(masks, their_masks, strict=True):
                note(path, "original_iou", iou(mine, other))
            for stage, (mine, other) in enumerate(zip(maps, theirs, strict=True), 1):
                note(path, f"stage{stage}_cosine", float(functional.cosine_similarity(mine, other, 1).mean()))
        print(f"\r{count + 1} photographs", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    first = rows[original]["truth_iou"]
    found = []
    for path, metrics in rows.items():
        row: dict[str, Any] = {"model": path.name if path == original else "/".join(path.parts[-2:])}
        row |= {metric: fmean(values) for metric, values in metrics.items()}
        if path != original:
            apart = [mine - other for mine, other in zip(metrics["truth_iou"], first, strict=True)]
            row["truth_iou_difference"] = fmean(apart)
            row["truth_iou_interval"] = 1.96 * float(np.std(apart, ddof=1)) / len(apart) ** 0.5
        found.append(row)
    return {"kind": "sam2", "objects": len(first), "environment": environment(device), "rows": found}


def save(weights: Path, folder: Path) -> None:
    model = timm.create_model("sam2_hiera_tiny", num_classes=0)
    stored = next(weights.glob("sam2_hiera_tiny*.safetensors"), None)
    names = [weights / f"sam2_hiera_tiny{kind}.safetensors" for kind in ("", ".fp16")]
    stored = next((name for name in names if name.exists()), stored)
    if stored is None:
        raise SystemExit(f"{weights} has no sam2_hiera_tiny.safetensors")
    state = {name: tensor.float() for name, tensor in load_file(stored).items()}
    print(model.load_state_dict(state, strict=False))
    linvit.save(model, folder)


def align(weights: Path, original: Path, photos: Path, run: Path, minutes: float, changes: list[str]) -> None:
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    neck = Neck(weights, torch.device(device))

    def watch(record: dict[str, Any]) -> None:
        if record["kind"] in ("note", "eval"):
            print(record.get("text") or {k: v for k, v in record.items() if "cosine" in k}, file=sys.stderr, flush=True)

    def train(model: Any, part: str, epochs: dict[str, float], **how: Any) -> None:
        stages = [f"stages.{stage}.epochs={epochs.get(stage, 0)}" for stage in ("align", "blocks", "final")]
        settings = [*SETTINGS, *stages, *changes]
        there = {"output": run / part, "resume": True, "watch": watch, "device": device, **how}
        linvit.train(model, photos, task="features", size=SIZE, settings=settings, reader=neck.read, **there)

    train(original, "start", {"align": 1, "blocks": 1}, plan=PLAN)
    known = read_json(run / "final" / "run.json")
    if known is None:
        *_, record = (each for each in read_log(run / "start") if each.get("stage") == "blocks")
        images = sum(1 for file in (photos / "train").rglob("*") if file.is_file())
        left = 60 * minutes - RESERVE - (time.monotonic() - began)
        epochs = max(1, int(left * (record["images_per_second"] or 0.0) / images))
    else:
        epochs = next(stage["epochs"] for stage in known["config"]["stages"] if stage["name"] == "final")
    print(f"{epochs} epochs of final features", file=sys.stderr, flush=True)
    train(run / "start" / "last", "final", {"final": epochs}, teacher=original)


def unpack(archive: Path, folder: Path) -> None:
    for name, content in members(archive).items():
        if name.startswith("images/"):
            path = folder / name.removeprefix("images/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def table(result: dict[str, Any]) -> str:
    lines = [
        "| model | IoU with the original's masks | IoU with the truth | − original's | cosine, stages 1 to 4 |",
        "|---|---:|---:|---:|---|",
    ]
    for row in result["rows"]:
        cosines = ", ".join(f"{row[f'stage{s}_cosine']:.3f}" for s in range(1, 5) if f"stage{s}_cosine" in row)
        with_original = f"{100 * row['original_iou']:.1f}" if "original_iou" in row else ""
        apart = ""
        if "truth_iou_difference" in row:
            apart = f"{100 * row['truth_iou_difference']:+.2f} ± {100 * row['truth_iou_interval']:.2f}"
        lines.append(f"| {row['model']} | {with_original} | {100 * row['truth_iou']:.1f} | {apart} | {cosines} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    saving = verbs.add_parser("save")
    saving.add_argument("weights", type=Path)
    saving.add_argument("folder", type=Path)
    pictures = verbs.add_parser("photographs")
    pictures.add_argument("archive", type=Path)
    pictures.add_argument("folder", type=Path)
    aligning = verbs.add_parser("align")
    for name in ("weights", "original", "photographs", "run"):
        aligning.add_argument(name, type=Path)
    aligning.add_argument("--minutes", type=float, default=9.0, help="how long, from the start on")
    aligning.add_argument("--set", action="append", default=[], help="change the recipe, as linvit train does")
    judging = verbs.add_parser("judge")
    judging.add_argument("weights", type=Path)
    judging.add_argument("original", type=Path)
    judging.add_argument("students", type=Path, nargs="*")
    judging.add_argument("--data", type=Path, required=True)
    judging.add_argument("--limit", type=int, help="only so many photographs")
    judging.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    if asked.verb == "save":
        save(asked.weights, asked.folder)
    elif asked.verb == "photographs":
        unpack(asked.archive, asked.folder)
    elif asked.verb == "align":
        align(asked.weights, asked.original, asked.photographs, asked.run, asked.minutes, asked.set)
    else:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        found = judge(asked.weights, asked.original, asked.students, asked.data, asked.limit, device)
        if asked.output:
            write_json(asked.output, found)
        print(table(found))


if __name__ == "__main__":
    main()
