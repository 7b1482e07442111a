"""Training: recipes, a task-neutral engine with callbacks, objectives, optimisers and checkpoints."""

from linvit.training.config import Config, Stage, override
from linvit.training.contract import BatchSource, Objective, Task
from linvit.training.engine.loop import Engine, Outcome, Output
from linvit.training.engine.phases import Phase
from linvit.training.processes import Processes, close_process_group, make_processes
from linvit.training.recipes import list_recipes, recipe

__all__ = [
    "BatchSource",
    "Config",
    "Engine",
    "Objective",
    "Outcome",
    "Output",
    "Phase",
    "Processes",
    "Stage",
    "Task",
    "close_process_group",
    "list_recipes",
    "make_processes",
    "override",
    "recipe",
]
