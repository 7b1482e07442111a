"""OpenVINO, from the program itself, or by way of ONNX where sizes vary: it has no rule for arithmetic with them.

Precision in computing follows the device: here it is told to be accurate, and what fp16 means is the weights. int8 is
NNCF's, with the products of two activations left in float.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from linvit.runtimes import onnx
from linvit.runtimes.target import ExportJob, Target


def write(job: ExportJob) -> dict[str, Any]:
    import openvino

    facts: dict[str, Any] = {}
    if job.program.range_constraints:
        with tempfile.TemporaryDirectory(dir=job.path.parent) as folder:  # the weights of a large one lie beside it
            between = Path(folder, "between.onnx")
            onnx.write(replace(job, path=between, precision="fp32"))
            model = openvino.convert_model(between)
    else:
        model = openvino.convert_model(job.program)
    if job.precision == "int8":
        model, facts = to_int8(model, job)
    openvino.save_model(model, job.path, compress_to_fp16=job.precision == "fp16")
    return facts


def token_sums(model: Any) -> list[str]:
    """Names of the nodes that add up over tokens: products of two activations, attention, softmaxes and sums."""
    whole = ("ScaledDotProductAttention", "Softmax", "ReduceSum", "ReduceMean", "Einsum")
    found = []
    for op in model.get_ordered_ops():
        kind = op.get_type_name()
        if kind in whole or (kind == "MatMul" and not any(weighs(op.input_value(i).get_node()) for i in (0, 1))):
            found.append(op.get_friendly_name())
    return found


def weighs(op: Any) -> bool:
    """Whether a node is a weight, be it cast or reshaped on the way."""
    if op.get_type_name() == "Constant":
        return True
    return op.get_input_size() > 0 and all(weighs(op.input_value(i).get_node()) for i in range(op.get_input_size()))


def to_int8(model: Any, job: ExportJob) -> tuple[Any, dict[str, Any]]:
    import nncf

    nncf.set_log_level("ERROR")
    kept = token_sums(model)
    made = nncf.quantize(
        model,
        nncf.Dataset(job.calibration),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=len(job.calibration),
        ignored_scope=nncf.IgnoredScope(names=kept, validate=False),
    )
    return made, {"float32_nodes": len(kept)}


TARGET = Target("openvino", "OpenVINO", ".xml", ("openvino", "nncf", "onnx", "onnxscript"), write)
