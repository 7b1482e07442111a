"""ONNX, by PyTorch's dynamo exporter; run by ONNX Runtime.

Half precision and int8 leave the products of two activations in float32: those are attention's sums over tokens, which
overflow in half precision and lose the most in eight bits.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from linvit.runtimes.target import ExportJob, Target

WEIGHED = ("Conv", "Gemm", "MatMul")  # products with weights
LARGEST = 2**31 - 2**24  # bytes that one protobuf file can hold


def write(job: ExportJob) -> dict[str, Any]:
    program: Any = torch.onnx.export(job.program, (), dynamo=True, optimize=True, verbose=False, external_data=False)
    known = (job.program.state_dict, job.program.constants)
    weights = (value for values in known for value in values.values() if isinstance(value, torch.Tensor))
    program.save(str(job.path), external_data=sum(value.nbytes for value in weights) > LARGEST)
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
    made = convert_float_to_float16(model, keep_io_types=True, node_block_list=kept)
    beside = beside_of(path)
    beside.unlink(missing_ok=True)  # else it would be added to
    large = sum(len(value.raw_data) for value in made.graph.initializer) > LARGEST
    onnx.save(made, path, save_as_external_data=large, location=beside.name)
    return len(kept)


def beside_of(path: Path) -> Path:
    """Where the weights of a model are that one file cannot hold."""
    return path.with_name(f"{path.name}.data")


def to_int8(path: Path, batches: list[np.ndarray]) -> int:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self, name: str) -> None:
            self.rows = iter({name: batch} for batch in batches)

        def get_next(self) -> Any:
            return next(self.rows, None)

    large = beside_of(path).exists()
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        ready = Path(folder, path.name)
        quant_pre_process(
            str(path), str(ready), skip_symbolic_shape=True,
            save_as_external_data=large, all_tensors_to_one_file=True, external_data_location=beside_of(ready).name,
        )  # fmt: skip
        model = onnx.load(ready, load_external_data=False)
        kept = token_sums(model)
        beside_of(path).unlink(missing_ok=True)
        quantize_static(
            str(ready), str(path), Reader(model.graph.input[0].name),
            op_types_to_quantize=list(WEIGHED), nodes_to_exclude=kept, per_channel=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
            use_external_data_format=large, extra_options={"MatMulConstBOnly": True},
        )  # fmt: skip
    return len(kept)


TARGET = Target("onnx", "ONNX", ".onnx", ("onnx", "onnxscript", "onnxruntime"), write)
