"""Every mechanism in every runtime that runs here, on a photograph. A new one is tested by being registered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from linvit.attention import TokenGrid
from linvit.runtimes.exporting import find_target
from linvit.runtimes.photographs import photographs
from linvit.runtimes.preparing import trace
from linvit.runtimes.process import Process
from linvit.runtimes.target import Job, hushed
from linvit.runtimes.verifying import prepared, relative_rms
from tests.attention.cases import HEAD_DIM, HEADS, Case, cases, supported

SIZE = (48, 64)
PLAIN = {"mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 1.0, "crop_mode": "center", "interpolation": "bilinear"}


class Every(nn.Module):
    """One mechanism after the other behind one stem, each with an output of its own: a program tests them all."""

    def __init__(self, chosen: list[Case]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.grids = [supported(case, TokenGrid(6, 8, 1)) for case in chosen]
        self.mechanisms = nn.ModuleList(case.build(grid) for case, grid in zip(chosen, self.grids, strict=True))
        self.stem = nn.Conv2d(3, 3 * HEADS * HEAD_DIM, 8, stride=8)

    def forward(self, images: Tensor) -> list[Tensor]:
        tokens = self.stem(images).flatten(2).transpose(1, 2)
        tokens = torch.cat((tokens.mean(1, keepdim=True), tokens), dim=1)
        outs = []
        for mechanism, grid in zip(self.mechanisms, self.grids, strict=True):
            q, k, v = tokens[:, 1 - grid.prefix :].unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
            x = q.transpose(1, 2).flatten(2) if mechanism.capabilities.input else None
            outs.append(mechanism(q, k, v, grid, x=x))
        return outs


@pytest.mark.parametrize("to", ["onnx", "openvino", "executorch"])
def test_matches_pytorch_on_a_photograph(to: str, tmp_path: Path) -> None:
    target = find_target(to)
    for package in target.packages:
        pytest.importorskip(package, reason=f"pip install 'linvit[{to}]'")
    first = {case.name: case for case in reversed(cases())}  # ExecuTorch lowers slowly: each in its usual form
    chosen = list(first.values()) if to == "executorch" else cases()
    model = Every(chosen).eval()
    image = prepared(model, photographs(1), PLAIN, SIZE)
    with torch.no_grad():
        wanted = model(image)
    path = tmp_path / f"every{target.suffix}"
    with hushed():
        target.write(Job(trace(model, image, dynamic=False), path, "fp32"))
    with Process(path) as process:
        found = process.run(image.numpy())
    errors = {str(case): relative_rms(torch.from_numpy(f), w) for case, f, w in zip(chosen, found, wanted, strict=True)}
    assert {name: error for name, error in errors.items() if not error < 1e-4} == {}
