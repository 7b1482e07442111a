"""An exported file, opened by its own runtime: what verification and timing ask, and what a device would run.

This file stands alone. It is run by its path in a process of its own, needs numpy, Pillow and the runtime, and knows
linvit only where PyTorch itself is the runtime. So what it reads is the saved file and the JSON beside it, nothing
else. Asked through pipes: a JSON line and arrays come in, a JSON line and arrays go out (`linvit.runtimes.process`).
"""

import io
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Arrays = list[np.ndarray]
Run = Callable[[np.ndarray], Arrays]


def open_onnx(path: str, threads: int, layers: list[str]) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    source: Any = path
    if layers:
        import onnx

        model = onnx.load(path)
        known = {name for node in model.graph.node for name in node.output}
        for name in layers:  # of what an optimiser took away there is an empty array
            if name in known:
                model.graph.output.append(onnx.ValueInfoProto(name=name))
        source = model.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    given, there = session.get_inputs()[0].name, {value.name for value in session.get_outputs()}
    own = [value.name for value in session.get_outputs() if value.name not in layers]

    def run(images: np.ndarray) -> Arrays:
        names = own + [name for name in layers if name in there]
        found = dict(zip(names, session.run(names, {given: images}), strict=True))
        return [found.get(name, np.zeros(0, np.float32)) for name in own + layers]

    return run


def open_openvino(path: str, threads: int, layers: list[str]) -> Run:
    import openvino

    core = openvino.Core()
    model = core.read_model(path)
    outputs, there = len(model.outputs), set()
    if layers:
        named = {name: op.output(0) for op in model.get_ordered_ops() for name in op.output(0).get_names()}
        named |= {name.removesuffix(":0"): port for name, port in named.items()}
        wanted = [(name, named[name]) for name in layers if name in named]
        there = {name for name, _ in wanted}
        model.add_outputs([port for _, port in wanted])
    # Its CPU computes in bfloat16 where it can; the file is judged in its own precision.
    config = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "EXECUTION_MODE_HINT": "ACCURACY"}
    request = core.compile_model(model, "CPU", config).create_infer_request()

    def run(images: np.ndarray) -> Arrays:
        request.infer([images])
        found = [request.get_output_tensor(i).data.copy() for i in range(outputs + len(there))]
        extra = iter(found[outputs:])
        return found[:outputs] + [next(extra) if name in there else np.zeros(0, np.float32) for name in layers]

    return run


def open_executorch(path: str, threads: int, layers: list[str]) -> Run:
    import torch
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime

    portable_lib._unsafe_reset_threadpool(threads)
    method = Runtime.get().load_program(path).load_method("forward")
    if method is None:
        raise ValueError("it has no method 'forward'")

    def run(images: np.ndarray) -> Arrays:
        return [value.numpy() for value in method.execute([torch.from_numpy(images)])]

    return run


def open_pytorch(path: str, threads: int, compiled: bool) -> Run:
    """A folder that linvit saved."""
    import torch

    from linvit.conversion import load

    torch.set_num_threads(threads)
    model: Any = load(path)
    call = torch.compile(model, dynamic=False) if compiled else model

    def run(images: np.ndarray) -> Arrays:
        with torch.inference_mode():
            return [call(torch.from_numpy(images)).numpy()]

    return run


def read_coreml(path: str) -> list[dict[str, Any]]:
    """The operations of a Core ML program: type, name, precision, whether operands are computed, the section it is in.
    It runs on Apple's systems only."""
    import logging

    logging.disable(logging.WARNING)  # of libraries that Linux does not have
    hidden: dict[str, Any] = dict.fromkeys(("torch", "sklearn"))  # which it would import to convert from, for seconds
    sys.modules.update({name: value for name, value in hidden.items() if name not in sys.modules})
    import coremltools

    spec = coremltools.utils.load_spec(path)
    function = next(iter(spec.mlProgram.functions.values()))
    block = next(iter(function.block_specializations.values()))
    constant = {op.outputs[0].name for op in block.operations if op.type == "const" or op.type.startswith("constexpr")}
    found = []
    for op in block.operations:
        if op.outputs and op.outputs[0].name not in constant:
            names = [bound.name for given in op.inputs.values() for bound in given.arguments if bound.name]
            kinds = coremltools.proto.MIL_pb2.DataType.Name(op.outputs[0].type.tensorType.dataType)
            shape = [d.constant.size if d.HasField("constant") else 0 for d in op.outputs[0].type.tensorType.dimensions]
            row = {"op": op.type, "name": op.outputs[0].name, "dtype": kinds, "shape": shape}
            found.append({**row, "inputs": [name for name in names if name not in constant]})
    return found


def open_file(path: str, threads: int, layers: list[str], how: str) -> Run:
    if how in ("eager", "compiled"):
        return open_pytorch(path, threads, how == "compiled")
    ways = {".onnx": open_onnx, ".xml": open_openvino, ".pte": open_executorch}
    return ways[Path(path).suffix](path, threads, layers)


def prepare(picture: np.ndarray, how: dict[str, Any], size: tuple[int, int]) -> np.ndarray:
    """A photograph `(height, width, 3)` in bytes as the model wants it, `(3, height, width)`: resized so that the crop
    is `crop_pct` of it, cropped at its middle, normalised. As timm does for evaluation."""
    from PIL import Image

    image = Image.fromarray(picture).convert("L" if len(how["mean"]) == 1 else "RGB")
    sides, target = (image.height, image.width), [math.floor(side / how["crop_pct"]) for side in size]
    method = Image.Resampling[how["interpolation"].upper()]
    if how["crop_mode"] == "squash":
        new = tuple(target)
    elif target[0] == target[1]:  # the shorter side, the longer one cut to whole pixels
        new = tuple(target[0] if side == min(sides) else int(target[0] * side / min(sides)) for side in sides)
    else:  # as little as covers both sides, and by timm always bilinearly
        ratio = min(side / wanted for side, wanted in zip(sides, target, strict=True))
        new, method = tuple(round(side / ratio) for side in sides), Image.Resampling.BILINEAR
    image = image.resize((new[1], new[0]), method)
    top, left = (round((new[i] - size[i]) / 2) for i in (0, 1))
    image = image.crop((left, top, left + size[1], top + size[0]))
    values: np.ndarray = np.asarray(image, np.float32).reshape(size[0], size[1], -1) / np.float32(255)
    values = (values - np.asarray(how["mean"], np.float32)) / np.asarray(how["std"], np.float32)
    return np.ascontiguousarray(values.transpose(2, 0, 1))


def peak_bytes() -> int:
    """The most memory this process ever held. On Linux `ru_maxrss` begins with the parent's, so /proc is read."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def serve(path: str, threads: int, layers: list[str], how: str, asked: Any, answered: Any) -> None:
    """Open the file, then answer until nothing more is asked."""
    if path.endswith(".mlpackage"):
        write(answered, {"operations": read_coreml(path)}, [])
        return
    before = peak_bytes()
    run = open_file(path, threads, layers, how)
    write(answered, {"peak_bytes": peak_bytes() - before}, [])
    beside = Path(f"{path}.json")
    sidecar = json.loads(beside.read_text(encoding="utf-8")) if beside.is_file() else {}
    while line := asked.readline():
        question = json.loads(line)
        arrays = read_arrays(asked, question["bytes"])
        if question["ask"] == "photographs":
            size = tuple(question["size"] or sidecar["size"])
            images = np.stack([prepare(picture, sidecar["preprocessing"], size) for picture in arrays])
            batches = [images] if question["together"] else np.split(images, len(images))
            rows = [run(batch) for batch in batches]
            write(answered, {}, [np.concatenate(parts) for parts in zip(*rows, strict=True)])
        elif question["ask"] == "run":
            write(answered, {}, run(arrays[0]))
        else:
            seconds, worked = [], []
            for _ in range(question["calls"]):
                begin, busy = time.perf_counter(), time.process_time()
                run(arrays[0])
                seconds.append(time.perf_counter() - begin)
                worked.append(time.process_time() - busy)
            write(answered, {"seconds": seconds, "cpu_seconds": worked, "peak_bytes": peak_bytes() - before}, [])


def read_arrays(source: Any, count: int) -> Arrays:
    with np.load(io.BytesIO(source.read(count)), allow_pickle=False) as held:
        return [held[f"arr_{place}"] for place in range(len(held.files))]


def write(target: Any, answer: dict[str, Any], arrays: Arrays) -> None:
    packed = io.BytesIO()
    np.savez(packed, *arrays)
    target.write(json.dumps({**answer, "bytes": packed.tell()}).encode() + b"\n" + packed.getvalue())
    target.flush()


def main() -> None:
    """Whatever the runtimes print goes to stderr: stdout is the pipe."""
    settings = json.loads(sys.argv[1])
    answered = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        serve(settings["path"], settings["threads"], settings["layers"], settings["how"], sys.stdin.buffer, answered)
    except Exception as error:  # what the runtime makes of the file is for the one who asked to tell
        write(answered, {"error": " ".join(f"{type(error).__name__}: {error}".split())}, [])


if __name__ == "__main__":
    main()
