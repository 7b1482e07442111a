"""ExecuTorch, lowered to XNNPACK as far as that goes. What it does not take runs on ExecuTorch's portable kernels,
which are slow, so the share of the nodes it took is told."""

from typing import Any

import torch
from torch import Tensor

from linvit.runtimes.target import ExportJob, Target

aten = torch.ops.aten

NO_WORK = "getitem"  # hands on what a delegated part gave
TOLD = 6  # kinds of nodes that were left


def write(job: ExportJob) -> dict[str, Any]:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.devtools.backend_debug import get_delegation_info
    from executorch.exir import to_edge_transform_and_lower

    program = job.program.run_decompositions(REWRITTEN)
    made = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
    found = get_delegation_info(made.exported_program().graph_module).delegation_by_operator
    job.path.write_bytes(made.to_executorch().buffer)
    kinds = {kind: counts for kind, counts in found.items() if NO_WORK not in kind}
    taken, left = (sum(getattr(counts, which) for counts in kinds.values()) for which in ("delegated", "non_delegated"))
    names = {kind.removeprefix("aten_").removesuffix("_default"): c.non_delegated for kind, c in kinds.items()}
    most = sorted(((name, count) for name, count in names.items() if count), key=lambda pair: -pair[1])
    return {"delegated": taken / max(taken + left, 1), "nodes": taken + left, "left": dict(most[:TOLD])}


def softmax_of_rows(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Behind a convolution, as talking heads are one, XNNPACK has channels last and takes them for the last dimension:
    it is given rows of three dimensions, which have one order only."""
    x = x if dtype is None else x.to(dtype)
    if x.ndim < 4 or dim not in (-1, x.ndim - 1):
        return aten._softmax(x, dim, False)
    return aten._softmax(x.flatten(0, -3), -1, False).view(x.shape)


REWRITTEN = {aten.softmax.int: softmax_of_rows}


TARGET = Target(
    "executorch",
    "ExecuTorch",
    ".pte",
    ("executorch",),
    write,
    refused={
        "fp16": "XNNPACK would run most of it in float32 again; use fp32",
        "int8": "static quantisation is ONNX's and OpenVINO's here; use one of those",
        "dynamic": "XNNPACK leaves shapes that vary to slow kernels; export one file for each size",
    },
    shows_layers=False,
)
