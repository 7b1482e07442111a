"""Every mechanism in every runtime that runs here, on a photograph. A new one is tested by being registered."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from linvit.attention import TokenGrid, list_mechanisms
from linvit.runtimes.coreml import check_structure
from linvit.runtimes.exporting import find_target
from linvit.runtimes.opened import open_file
from linvit.runtimes.photographs import photographs
from linvit.runtimes.preparing import trace
from linvit.runtimes.process import Process
from linvit.runtimes.target import ExportJob, hushed
from linvit.runtimes.verifying import prepared, relative_rms
from tests.attention.cases import HEAD_DIM, HEADS, Case, cases, supported

SIZE = (48, 64)
TOGETHER = 15
Program = tuple[list[Case], Tensor, list[Tensor], ExportedProgram]
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


@pytest.fixture(scope="module")
def programs() -> list[Program]:
    """Every mechanism in its first form, half of them to a program: every program costs something, and what ExecuTorch
    needs grows faster than a long one."""
    first = list({case.name: case for case in reversed(cases())}.values())
    assert {case.name for case in first} == set(list_mechanisms())
    found = []
    for start in range(0, len(first), TOGETHER):
        chosen = first[start : start + TOGETHER]
        model = Every(chosen).eval()
        image = prepared(model, photographs(1), PLAIN, SIZE)
        with torch.no_grad(), hushed():
            found.append((chosen, image, model(image), trace(model, image, dynamic=False)))
    return found


@pytest.mark.parametrize("to", ["onnx", "openvino", "executorch"])
def test_matches_pytorch_on_a_photograph(to: str, programs: list[Program], tmp_path: Path) -> None:
    target = find_target(to)
    for package in target.packages:
        pytest.importorskip(package, reason=f"pip install 'linvit[{to}]'")
    errors = {}
    for chosen, image, wanted, program in programs:
        path = tmp_path / f"{chosen[0].name}{target.suffix}"
        with hushed():
            target.write(ExportJob(program, path, "fp32"))
        found = open_file(str(path), 1, [], "")(image.numpy())
        for case, one, other in zip(chosen, found, wanted, strict=True):
            errors[str(case)] = relative_rms(torch.from_numpy(one), other)
    assert {name: error for name, error in errors.items() if not error < 1e-4} == {}


def test_converts_to_core_ml(programs: list[Program], tmp_path: Path) -> None:
    """With every sum over tokens in float32 although the rest is in half precision; it runs on Apple's systems only."""
    pytest.importorskip("coremltools", reason="pip install 'linvit[coreml]'")
    target = find_target("coreml")
    for chosen, _, _, program in programs:
        path = tmp_path / f"{chosen[0].name}{target.suffix}"
        with hushed():
            target.write(ExportJob(program, path, "fp16"))
        with Process(path) as process:
            assert check_structure(process.opened["operations"])["float32_sums"] >= len(chosen)
