"""Core ML, by `torch.export`'s program with its decompositions; an ML program for iOS 17 and later.

Core ML computes in half precision unless told otherwise. What adds up over tokens stays in float32, operation by
operation. It runs on Apple's systems only, so a program made here is checked by its structure.
"""

from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.export import ExportedProgram

from linvit.errors import LinvitError
from linvit.runtimes.target import ExportJob, Target

SUMS = ("softmax", "reduce_sum", "reduce_mean", "reduce_l2_norm", "reduce_sum_square", "reduce_max", "einsum")
UNKNOWN = (torch.ops.aten.lerp, torch.ops.aten.new_ones)  # to the converter, until they are taken apart
RETIRED = ("custom_layer", "custom")  # what no device has


def write(job: ExportJob) -> dict[str, Any]:
    import coremltools

    precision = coremltools.precision.FLOAT32
    if job.precision == "fp16":
        precision = coremltools.transform.FP16ComputePrecision(op_selector=lambda op: not adds_over_tokens(op))
    program = job.program.run_decompositions(get_decompositions(UNKNOWN))
    leave_out_aliases(program)
    model = coremltools.convert(
        program,
        minimum_deployment_target=coremltools.target.iOS17,
        compute_precision=precision,
        skip_model_load=True,
    )
    model.save(str(job.path))
    return {}


def leave_out_aliases(program: ExportedProgram) -> None:
    """Second names of a tensor, which decompositions leave behind and the converter does not know."""
    for node in list(program.graph.nodes):
        if node.target is torch.ops.aten.alias.default:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)


def adds_over_tokens(op: Any) -> bool:
    """Products of two activations, softmaxes and sums."""
    if op.op_type == "matmul":
        return op.x.op is not None and op.x.val is None and op.y.val is None
    return op.op_type in (*SUMS, "scaled_dot_product_attention")


def check_structure(operations: list[dict[str, Any]]) -> dict[str, Any]:
    """What the saved program says of itself: no operation that a device lacks, and float32 in every sum over tokens."""
    lacking = sorted({op["op"] for op in operations if op["op"] in RETIRED})
    if lacking:
        raise LinvitError(f"the Core ML program has operations that no device runs: {', '.join(lacking)}")
    sums = [op for op in operations if op["op"] in SUMS or (op["op"] == "matmul" and len(op["inputs"]) > 1)]
    half = [op["name"] for op in sums if op["dtype"] != "FLOAT32"]
    if half:
        raise LinvitError(f"the Core ML program adds up over tokens in half precision, beginning with {half[0]}")
    return {"operations": len(operations), "float32_sums": len(sums)}


TARGET = Target(
    "coreml",
    "Core ML",
    ".mlpackage",
    ("coremltools",),
    write,
    refused={
        "int8": "it cannot be run here, so its accuracy could not be shown; quantise on a Mac with coremltools",
        "dynamic": "its program is made for one size; export one file for each",
    },
    runs_here=False,
)
