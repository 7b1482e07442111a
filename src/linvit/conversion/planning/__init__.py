"""Plans that pay: what each layer costs with each mechanism, measured where it will run, and which layers to convert.

`costs` counts tokens and MACs, `timing` takes times, and `front` makes whole plans of them.
"""

from linvit.conversion.planning.costs import LayerCost, layer_costs
from linvit.conversion.planning.front import CANDIDATES, FrontPlan, LayerOption, LayerOptions, Study, study, the_choice
from linvit.conversion.planning.timing import LayerTime, Setting

__all__ = [
    "CANDIDATES", "FrontPlan", "LayerCost", "LayerOption", "LayerOptions", "LayerTime", "Setting", "Study",
    "layer_costs", "study", "the_choice",
]  # fmt: skip
