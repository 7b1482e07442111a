"""The public interface: what comes from `linvit` and from its rooms, what importing it costs, what documents import."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import linvit

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Frozen: a change here is a change of the interface, made on purpose.
PUBLIC = {
    *("Capabilities", "Choice", "LinvitError", "Mechanism", "Plan", "Rotary", "Rule", "TokenGrid"),
    *("compare", "convert", "create_attention", "evaluate", "export", "list_mechanisms", "list_models", "list_plans"),
    *("list_recipes", "load", "load_weights", "model_card", "predict", "push_to_hub", "recipe", "register", "report"),
    *("resample_patches",),
    *("__version__", "resample_windows", "save", "train"),
}
ROOMS = {
    "attention": {
        *("Call", "Capabilities", "Constant", "ConvWidth", "Count", "Direction", "EluPlusOne", "Eps", "Feature"),
        *("Formula", "Fusion", "GridConv", "LinearAttention", "Mechanism", "NormShortcut", "Normaliser", "Number"),
        *("Range", "ReLU", "Rotary", "RowSum", "Shape", "Sigmoid", "Size", "TokenConv", "TokenGrid", "Unnormalised"),
        *("begin_at_zero", "check_options", "create_attention", "lift", "list_mechanisms"),
        *("mechanism_class", "options_of", "register", "regroup", "values_at_queries"),
    },
    "conversion": {
        *("Choice", "Conversion", "Layer", "Pick", "Plan", "Report", "Rule", "Sensitivity", "Source", "as_plan"),
        *("convert", "droppable", "find_hosts", "list_plans", "load", "load_weights", "measure_sensitivity"),
        *(
            "model_card",
            "open_model",
            "open_original",
            "output_similarity",
            "parse_plan",
            "push_to_hub",
            "register_auto_classes",
            "resample",
            "resample_patches",
            "resample_windows",
        ),
        *("save", "survey"),
    },
    "models": {"HEADS", "Backbone", "DenseModel", "FairPyramid", "list_models", "make_backbone"},
    "measurement": {"CONVENTIONS", "Macs", "count_macs", "count_parameters", "measure_macs"},
    "runtimes": {"PRECISIONS", "TARGETS", "Check", "Exported", "export"},
    "figures": {"check_picture", "plot_edge", "plot_front", "plot_masks", "plot_op", "plot_sensitivity", "plot_theory"},
    "training": {
        *("BatchSource", "Config", "Engine", "Objective", "Outcome", "Output", "Phase", "Processes", "Stage", "Task"),
        *("close_process_group", "list_recipes", "make_processes", "override", "recipe"),
    },
    "tasks": {"Classified", "Detected", "Prediction", "Segmented", "Trained", "evaluate", "predict", "train"},
    "comparison": {"Comparison", "Measure", "compare", "report"},
}
LAZY_ROOMS = ("training", "tasks", "comparison", "measurement", "figures", "runtimes", "page", "cli")


def test_the_list_is_frozen() -> None:
    assert set(linvit.__all__) == PUBLIC and set(linvit.__all__) <= set(dir(linvit))
    assert len(linvit.__all__) == len(PUBLIC) and not hasattr(linvit, "no_such_thing")


@pytest.mark.parametrize("name", sorted(PUBLIC - {"__version__"}))
def test_every_name_is_there_documented_and_typed(name: str) -> None:
    found = getattr(linvit, name)
    assert (inspect.getdoc(found) or "").strip(), f"{name} has no docstring"
    if inspect.isfunction(found):
        signature = inspect.signature(found)
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_the_list_of_each_room_is_frozen(room: str) -> None:
    module = importlib.import_module(f"linvit.{room}")
    assert set(module.__all__) == ROOMS[room]
    assert all(hasattr(module, name) for name in module.__all__)


def test_a_function_is_not_lost_behind_a_folder_of_its_name() -> None:
    for name in ("linvit.comparison.reporting", "linvit.conversion.convert"):
        importlib.import_module(name)
    assert callable(linvit.report) and callable(linvit.convert)


def test_type_checkers_read_the_annotations() -> None:
    assert (Path(linvit.__file__).parent / "py.typed").exists()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["linvit"]


def imported() -> tuple[set[str], float, float]:
    """The modules that linvit brings beyond timm's, and the processor seconds of importing timm and then linvit."""
    code = """
import json, sys, time
begin = time.process_time()
import timm
between, known = time.process_time(), set(sys.modules)
import linvit
print(json.dumps([sorted(set(sys.modules) - known), between - begin, time.process_time() - between]))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    names, before, after = json.loads(done.stdout.splitlines()[-1])
    return set(names), before, after


def test_importing_costs_little_more_than_timm() -> None:
    names, before, after = imported()
    others = {name.split(".")[0] for name in names} - {"linvit", "torch", *sys.stdlib_module_names}
    assert not others, f"import linvit brings {sorted(others)}"
    heavy = {name for name in names if re.match(r"torch\._(dynamo|inductor)|torchvision\.models\.detection", name)}
    assert not heavy
    rooms = {name.split(".")[1] for name in names if name.startswith("linvit.")}
    assert not rooms & set(LAZY_ROOMS)
    limit = max(0.3, before / 8)  # a third of a second, or as much longer as a busy machine takes for timm itself
    assert after < limit or min(imported()[2] for _ in range(2)) < limit, f"{after:.2f} s beside {before:.2f} s"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_import_from_linvit_or_one_level_below(document: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", document.read_text(encoding="utf-8"), re.DOTALL)
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        imports = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            imports = [node.module or ""]
        for module in (name for name in imports if name.split(".")[0] == "linvit"):
            assert module.count(".") < 2, f"{module} is not public: import from {'.'.join(module.split('.')[:2])}"
            if isinstance(node, ast.ImportFrom):
                missing = {alias.name for alias in node.names} - {*importlib.import_module(module).__all__}
                assert not missing, f"{module} has no public {sorted(missing)[0]}"
