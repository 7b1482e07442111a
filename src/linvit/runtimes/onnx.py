"""ONNX, by PyTorch's dynamo exporter; run by ONNX Runtime.

Half precision and int8 leave the products of two activations in float32: those are attention's sums over tokens, which
overflow in half precision and lose the most in eight bits.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from linvit.runtimes.target import Job, Target

WEIGHED = ("Conv", "Gemm", "MatMul")  # products with weights
LARGEST = 2**31 - 2**24  # bytes that one protobuf file can hold


def write(job: Job) -> dict[str, Any]:
    program: Any = torch.onnx.export(job.program, (), dynamo=True, optimize=True, verbose=False, external_data=False)
    size = sum(value.numel() * value.element_size() for value in job.program.state_dict.values())
    program.save(str(job.path), external_data=size > LARGEST)
    facts: dict[str, Any] = {"opset": program.model.opset_imports[""]}
    if job.precision == "fp16":
        return facts | {"float32_nodes": to_half(job.path)}
    if job.precision == "int8":
        return facts | {"float32_nodes": to_int8(job.path, job.calibration)}
    return facts


def token_sums(model: Any) -> list[str]:
    """Nodes that add up over tokens: products of two activations, softmaxes and sums."""
    weights = {value.name for value in model.graph.initializer}
    weights |= {name for node in model.graph.node if node.op_type == "Constant" for name in node.output}
    for node in model.graph.node:  # a weight that is only reshaped or cast is a weight
        if node.input and all(name in weights or not name for name in node.input):
            weights |= set(node.output)
    products = [n for n in model.graph.node if n.op_type == "MatMul" and not weights & set(n.input)]
    sums = [n for n in model.graph.node if n.op_type in ("Softmax", "ReduceSum", "ReduceMean", "ReduceL2", "Einsum")]
    return [node.name for node in products + sums]


def to_half(path: Path) -> int:
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    model = onnx.load(path)
    kept = token_sums(model)
    onnx.save(convert_float_to_float16(model, keep_io_types=True, node_block_list=kept), path)
    return len(kept)


def to_int8(path: Path, batches: list[np.ndarray]) -> int:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self, name: str) -> None:
            self.rows = iter({name: batch} for batch in batches)

        def get_next(self) -> Any:
            return next(self.rows, None)

    quant_pre_process(str(path), str(path), skip_symbolic_shape=True)
    model = onnx.load(path)
    kept = token_sums(model)
    quantize_static(
        str(path), str(path), Reader(model.graph.input[0].name),
        op_types_to_quantize=list(WEIGHED), nodes_to_exclude=kept, per_channel=True,
        activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        extra_options={"MatMulConstBOnly": True},
    )  # fmt: skip
    return len(kept)


TARGET = Target("onnx", "ONNX", ".onnx", ("onnx", "onnxscript", "onnxruntime"), write)
