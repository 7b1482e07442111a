"""What measuring MixA's layers gains: the table in docs/conversion.md. Small ViTs trained on scikit-learn's digits.

For each seed the outputs of the converted model, not trained again, are compared with the original's on held-out
images: with the layers that `measure_sensitivity` chooses, with those that are most sensitive alone, at fixed places.
"""

from __future__ import annotations

import copy

import timm
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import linvit
from linvit.conversion.plan import PLACES
from linvit.conversion.sensitivity import measure_sensitivity, output_similarity

TRAINING, MEASURING, EPOCHS = 1400, 256, 15


def trained(pictures: Tensor, labels: Tensor, seed: int) -> nn.Module:
    """A ViT of six layers after a few epochs on the first pictures."""
    torch.manual_seed(seed)
    shape = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 32, "depth": 6, "num_heads": 2}
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **shape)
    optimiser = torch.optim.AdamW(model.parameters(), 2e-3)
    for _ in range(EPOCHS):
        for rows in torch.randperm(TRAINING).split(50):
            loss = nn.functional.cross_entropy(model(pictures[rows]), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    return model.eval()


def main() -> None:
    digits = load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
    labels = torch.tensor(digits.target)
    print("| kept | measured layers | measured | most sensitive alone | first | last | alternating |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for seed in range(3):
        model = trained(pictures, labels, seed)

        def similarity(model: nn.Module = model, **options: object) -> float:
            student = copy.deepcopy(model)
            linvit.convert(student, "mixa", **options)
            return output_similarity(model, student, [pictures[TRAINING:]], images=len(pictures))

        for keep in (2, 3):
            found = measure_sensitivity(model, [pictures[:MEASURING]], keep=keep)
            alone = sorted(found.layers, key=lambda layer: -layer.turn)[:keep]
            values = [similarity(keep=found.keep), similarity(keep=tuple(layer.index for layer in alone))]
            values += [similarity(keep=keep, where=where) for where in PLACES]
            cells = " | ".join(f"{value:.3f}" for value in values)
            print(f"| {keep}, seed {seed} | {', '.join(map(str, found.keep))} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
