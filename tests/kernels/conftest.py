"""The kernels' tests run on a GPU where there is one, and otherwise in Triton's interpreter, at small sizes.

The interpreter must be asked for before Triton is first imported and would then serve every test of the process, so
`test_interpreted.py` runs these files in a process of their own; elsewhere they are not collected. The machine code is
read where kernels are compiled, with or without a GPU.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
FILES = {path.name for path in Path(__file__).parent.glob("test_*.py")}
COMPILED = {"test_machine_code.py"}


def patch_once() -> None:
    """The interpreter patches Triton's language again at every call within a kernel, which takes most of its time: here
    once in a launch for each module."""
    from triton.runtime import interpreter

    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    patched: set[int] = set()

    def launched(*args: Any, **options: Any) -> Any:
        patched.clear()
        return launch(*args, **options)

    def patched_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in patched:
            patched.add(module)
            return patch(function)

    interpreter.GridExecutor.__call__, interpreter._patch_lang = launched, patched_once


def compute_once() -> None:
    """Beside every sum and product of integers the interpreter computes it again in 64 bits and compares, for an
    assertion that is made where `debug` is set only: a third of its time. For every tensor it makes NumPy's names of
    all types and a shape of constants anew: here once for each type and each shape."""
    from triton.language import core
    from triton.runtime import interpreter

    builder, twin = interpreter.interpreter_builder, interpreter._get_np_dtype
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    twins: dict[str, Any] = {}

    def twin_once(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in twins:
            twins[name] = twin(kind)
        return twins[name]

    make = core.tensor.__init__
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def made(tensor: Any, handle: Any, kind: Any) -> None:
        shape = tuple(kind.shape.values) if kind.is_block() else ()
        if shape in shapes:
            tensor.handle, tensor.type, tensor.dtype = handle, kind, kind.scalar
            tensor.shape, tensor.numel = shapes[shape]
        else:
            make(tensor, handle, kind)
            shapes[shape] = tensor.shape, tensor.numel

    interpreter._get_np_dtype, core.tensor.__init__ = twin_once, made


if INTERPRETED:
    patch_once()
    compute_once()
    collect_ignore = sorted({"test_interpreted.py", *COMPILED})
else:
    collect_ignore = ["test_interpreted.py"] if ON_GPU else sorted(FILES - COMPILED - {"test_interpreted.py"})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The interpreter computes float16 as it does bfloat16: of tests with both, it runs the one."""
    if INTERPRETED and not ON_GPU:
        names = {item.nodeid for item in items}
        halves = [item for item in items if "torch.float16" in item.nodeid]
        twins = {item for item in halves if item.nodeid.replace("torch.float16", "torch.bfloat16") in names}
        config.hook.pytest_deselected(items=list(twins))
        items[:] = [item for item in items if item not in twins]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not ON_GPU:
        pytest.skip("needs a GPU")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")


@pytest.fixture(autouse=INTERPRETED and not ON_GPU)
def within_bounds() -> Iterator[None]:
    """No kernel of any test reads or writes outside of its tensors."""
    from tests.kernels.bounds import checked

    with checked():
        yield
