"""What each layer of a model costs before anything is timed: tokens, head size, MACs, by one pass on the meta device.

The pass runs a twin of the model whose every layer is a host of its own native mechanism, because a mechanism is told
the size of its call; the original module keeps that to itself.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from linvit.attention import Mechanism, Size
from linvit.conversion.convert import asks_of, current_mechanism, find_hosts, find_steps, install
from linvit.conversion.dry_run import dry_run
from linvit.conversion.hosts import host_of
from linvit.conversion.plan import Choice, Plan, Rule
from linvit.conversion.refusing import told


@dataclass(frozen=True)
class LayerCost:
    """One layer at one image size: how many calls of which size a picture makes of it, and what they cost in MACs."""

    index: int
    name: str
    mechanism: str
    size: Size | None = None  # none where the model never calls the layer, or not by itself
    macs: int = 0

    @property
    def windows(self) -> int:
        """How many sequences a picture makes: more than one where the layer looks at windows."""
        return self.size.batch if self.size is not None else 0


def native_plan(model: nn.Module) -> Plan:
    """The plan that makes every layer a host of what it has now."""
    hosts = find_hosts(model)
    rules = tuple(Rule(Choice(current_mechanism(m)), layers=(i,)) for i, (_, m) in enumerate(hosts))
    return Plan("native", None, rules)


def host_every_layer(model: nn.Module, size: tuple[int, int]) -> None:
    """Make hosts of the layers that are none yet, each of its native mechanism, in place: the model computes what it
    did, and its mechanisms can be watched."""
    fresh = [name for name, module in find_hosts(model) if not hasattr(module, "mechanism")]
    steps, _ = find_steps(model, native_plan(model), (), size=size)
    install(model, [step for step in steps if step.name in fresh])


def layer_costs(model: nn.Module, size: tuple[int, int]) -> list[LayerCost]:
    """What each layer costs for one picture, as the model is now. The model is not touched."""
    twin = copy.deepcopy(model)
    host_every_layer(twin, size)
    sizes: dict[str, list[tuple[Size, int]]] = {}
    for name, module in find_hosts(twin):
        mechanism = getattr(module, "mechanism", None)
        mixing = any(ask.feature == "talking_heads" for ask in asks_of(twin, module))
        if mixing:  # between its products, where it does not ask the mechanism
            host_of(module).give_up(module, "talking_heads")

        def see(mechanism: Mechanism, args: Any, named: Any, name: str = name, mixing: bool = mixing) -> None:
            call = Size.of(*args, **named)
            mixed = 2 * call.batch * call.heads**2 * call.queries * call.keys if mixing else 0
            sizes.setdefault(name, []).append((call, mechanism.macs(call) + mixed))

        if isinstance(mechanism, Mechanism):
            mechanism.register_forward_pre_hook(see, with_kwargs=True)
    with told(size):
        dry_run(twin, size)
    found = []
    for index, (name, module) in enumerate(find_hosts(model)):
        calls = sizes.get(name, [])
        size_of = calls[0][0] if calls else None
        found.append(LayerCost(index, name, current_mechanism(module), size_of, sum(macs for _, macs in calls)))
    return found


def with_choices(name: str, choices: list[Choice | None], drop: tuple[str, ...] = ()) -> Plan:
    """A plan that names a choice for each layer; layers without one stay as they are."""
    rules: dict[str, Rule] = {}
    for index, choice in enumerate(choices):
        if choice is not None:
            rule = rules.setdefault(str(choice), Rule(choice, layers=()))
            assert isinstance(rule.layers, tuple)
            rules[str(choice)] = replace(rule, layers=(*rule.layers, index))
    return Plan(name, None, tuple(rules.values()), drop)
