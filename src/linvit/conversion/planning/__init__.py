"""Plans that pay: what each layer costs with each mechanism, measured where it will run, and which layers to convert.

`costs` counts tokens and MACs, `timing` takes times, `front` makes whole plans of them, and `auto` is the plan that
converts what gets faster and nothing else.
"""

from linvit.conversion.planning.auto import choose_auto
from linvit.conversion.planning.costs import LayerCost, layer_costs
from linvit.conversion.planning.front import FrontPlan, LayerOptions, Study, study
from linvit.conversion.planning.timing import Setting, time_layers, time_models

__all__ = [
    "FrontPlan", "LayerCost", "LayerOptions", "Setting", "Study", "choose_auto", "layer_costs", "study", "time_layers",
    "time_models",
]  # fmt: skip
