"""The kernels' tests run on a GPU where there is one, and otherwise in Triton's interpreter, at small sizes.

The interpreter must be asked for before Triton is first imported and would then serve every test of the process, so
`test_interpreted.py` runs these files in a process of their own; elsewhere they are not collected. The machine code is
read where kernels are compiled, with or without a GPU.
"""

import os
from collections.abc import Iterator
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


if INTERPRETED:
    patch_once()
    collect_ignore = sorted({"test_interpreted.py", *COMPILED})
else:
    collect_ignore = ["test_interpreted.py"] if ON_GPU else sorted(FILES - COMPILED - {"test_interpreted.py"})


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The interpreter computes float16 as it does bfloat16: of tests with both, it runs the one."""
    names = {item.nodeid for item in items}
    twins = [item for item in items if item.nodeid.replace("torch.float16", "torch.bfloat16") in names - {item.nodeid}]
    if INTERPRETED and not ON_GPU and twins:
        config.hook.pytest_deselected(items=twins)
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
