"""The kernels' tests run on a GPU where there is one, and otherwise in Triton's interpreter, at small sizes.

The interpreter must be asked for before Triton is first imported and would then serve every test of the process, so
`test_interpreted.py` runs these files in processes of their own; elsewhere they are not collected.
"""

import os

import pytest
import torch

ON_GPU = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = ["test_interpreted.py"] if ON_GPU or INTERPRETED else ["test_[!i]*.py"]


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not ON_GPU:
        pytest.skip("needs a GPU")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if ON_GPU else "cpu")
