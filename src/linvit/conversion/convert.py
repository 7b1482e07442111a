"""Swap the attention of a model by a plan: in place, every weight kept, and a report of what changed."""

import copy
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import nn

from linvit.attention import Mechanism, TokenGrid, create_attention, mechanism_class
from linvit.attention.local import begin_at_zero
from linvit.conversion.bias_filters import fit_filters
from linvit.conversion.dry_run import dry_run
from linvit.conversion.grids import Grids, stem, watch
from linvit.conversion.host import FEATURES, Ask, Host
from linvit.conversion.hosts import host_for, host_of
from linvit.conversion.plan import Auto, Choice, Plan, as_plan
from linvit.conversion.refusing import no_hosts, told
from linvit.conversion.report import Conversion, Layer, Report
from linvit.errors import LinvitError, NotHonoured, unknown

Hosts = list[tuple[str, nn.Module]]


@dataclass(frozen=True)
class Step:
    """What is to become of one host."""

    name: str
    module: nn.Module
    choice: Choice
    mechanism: Mechanism
    dropped: tuple[str, ...]


def find_hosts(model: nn.Module) -> Hosts:
    """The attention modules that can be converted, with their names, in the order of the model."""
    return [(name, module) for name, module in model.named_modules() if host_for(module) is not None]


def asks_of(model: nn.Module, module: nn.Module) -> list[Ask]:
    """What an attention module of this model does beyond a plain mechanism."""
    return host_of(module).asks(model, module)


def droppable(model: nn.Module) -> set[str]:
    """What the attention of a model does that can be dropped."""
    return {ask.feature for _, module in find_hosts(model) for ask in asks_of(model, module) if ask.droppable}


def convert(
    model: nn.Module,
    plan: str | Plan,
    *,
    size: int | tuple[int, int] | None = None,
    drop: Iterable[str] = (),
    calibrate: Iterable[Any] | None = None,
    advance: Callable[[], None] = lambda: None,
    impl: str = "auto",
    quiet: bool = True,
    costs: bool = False,
    device: torch.device | str | None = None,
    **options: Any,
) -> Report:
    """Give the model's attention layers the mechanisms of a plan.

    `plan` is a Plan, the name of one (`mixa`, `castling`, …) or a mechanism's name; `options` go to it. `auto` converts
    the layers that are measured to get faster at this size on `device`, the model's own by default, and no other. What
    a mechanism cannot honour (a relative bias, say) is an error unless `drop` names it or the plan's own `drop` does,
    as the papers' plans do for what their papers go without; the report says which. What the argument `drop` names is
    dropped in every layer that the plan converts. `size` is the image size that learned positions are laid out for; the
    model's own by default. `calibrate`, batches of images, measures which layers a plan with `keep` keeps, and calls
    `advance` after each pass. With `quiet` the local branches that mechanisms bring along start at zero, as suits
    pretrained weights, and that of the option `local` as what comes nearest to a relative bias that is given up; a
    model to be trained from scratch wants them as their papers do. With `costs`, and for `auto`, the report counts
    tokens and MACs of each layer at that size. Nothing is touched before everything fits.
    """
    if not isinstance(model, nn.Module):
        given = repr(model) if isinstance(model, str) else type(model).__name__
        hint = f": build it with timm.create_model({given}, pretrained=True)" if isinstance(model, str) else ""
        raise LinvitError(f"convert takes a model, not {given}{hint}")
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper sees the change and compiles anew
    named = names_to_drop(drop)
    plan, measured, studied = as_plan(plan, **options), None, None
    hosts = find_hosts(model)
    if not hosts:
        raise no_hosts(model)
    pair = None if size is None else to_2tuple(size)
    if calibrate is not None or isinstance(plan, Auto):
        from linvit.conversion.resolving import place_by_sensitivity, resolve
    if calibrate is not None:
        plan, measured = place_by_sensitivity(model, plan, calibrate, named, advance)
    if isinstance(plan, Auto):
        plan, studied = resolve(model, plan, named, pair, device)
        costs = True
    steps, kept = find_steps(model, plan, named, size=pair, impl=impl, quiet=quiet)
    refuse_idle(model, plan, named, steps, by_times=studied is not None)
    filters = fit_filters(model, steps, pair) if quiet else {}
    before, tensors = dict(model.named_parameters()), model.state_dict().keys()
    counted = counted_macs(model, pair) if costs else {}
    was = {name: current_mechanism(module) for name, module in hosts}
    install(model, steps)
    done = Conversion(plan, tuple(sorted(named)), pair, getattr(model, "linvit_source", None))
    model.linvit_conversions = [*getattr(model, "linvit_conversions", []), done]  # type: ignore[assignment]
    after = dict(model.named_parameters())
    now = counted_macs(model, pair) if costs else {}
    made = {step.name: step for step in steps}
    layers = []
    for index, (name, _) in enumerate(hosts):
        layer = Layer(index, name, was[name], was[name], kept=kept.get(name, ""))
        if name in made:
            step = made[name]
            linear = step.mechanism.capabilities.linear
            layer = replace(layer, after=str(step.choice), dropped=step.dropped, linear=linear)
            speedup = None if studied is None else studied.ratio(index, step.choice)
            layer = replace(layer, filtered=filters.get(name), speedup=speedup)
        if name in now:
            layer = replace(layer, tokens=now[name][0], macs=(counted[name][1], now[name][1]))
        layers.append(layer)
    return Report(
        plan.name,
        tuple(layers),
        sum(p.numel() for n, p in after.items() if n not in before),
        tuple(sorted(tensors - model.state_dict().keys())),
        sum(p.numel() for n, p in before.items() if n not in after),
        measured,
        studied,
        named,
    )


def counted_macs(model: nn.Module, size: tuple[int, int] | None) -> dict[str, tuple[int, int]]:
    """Tokens of a sequence and MACs of a picture, for every layer that a picture passes."""
    from linvit.conversion.planning.costs import layer_costs

    found = layer_costs(model, size or own_size(model))
    return {cost.name: (cost.size.queries, cost.macs) for cost in found if cost.size is not None}


def names_to_drop(drop: Iterable[str]) -> tuple[str, ...]:
    """The features that a user names; one that no model's attention has is a mistake."""
    named = (drop,) if isinstance(drop, str) else tuple(dict.fromkeys(drop))
    for feature in named:
        if feature not in FEATURES:
            raise unknown("feature to drop", feature, FEATURES)
    return named


def find_steps(
    model: nn.Module,
    plan: Plan,
    named: Collection[str],
    *,
    size: tuple[int, int] | None = None,
    impl: str = "auto",
    quiet: bool = True,
) -> tuple[list[Step], dict[str, str]]:
    """What a plan makes of each host, and which hosts it leaves as they are and why. Nothing is touched.

    A host drops what is `named` and can be taken out of it, and what its mechanism cannot honour.
    """
    hosts = find_hosts(model)
    choices = plan.choices([name for name, _ in hosts])
    asks = {name: asks_of(model, module) for name, module in hosts}
    out = {name: tuple(a.feature for a in asks[name] if a.removable and a.feature in named) for name in asks}
    becoming = {name: without(module, out[name]) for name, module in hosts}
    grids = probe_grids(model, hosts, choices, becoming, size)
    steps, kept = [], {}
    lacking: list[tuple[str, str, str]] = []
    for (name, module), choice in zip(hosts, choices, strict=True):
        if choice is None:
            continue
        mechanism = build_mechanism(becoming[name], choice, grids.get(name), impl)
        if quiet:
            begin_at_zero(mechanism)
        unmet = [ask for ask in asks[name] if ask.feature not in out[name] and not ask.honoured_by(mechanism)]
        if any(ask.keeps for ask in unmet):
            kept[name] = next(ask.feature for ask in unmet if ask.keeps)
            continue
        check(name, unmet, mechanism, host_of(module).between)
        given_up = [ask.feature for ask in unmet]
        lacking += [(mechanism.name, name, f) for f in given_up if f not in named and f not in plan.drop]
        steps.append(Step(name, module, choice, mechanism, (*out[name], *given_up)))
    if lacking:
        features = list(dict.fromkeys(feature for *_, feature in lacking))
        first, name, _ = lacking[0]
        raise NotHonoured(f"{first} cannot honour the {' and '.join(features)} from {name} on", features)
    return steps, kept


def refuse_idle(
    model: nn.Module, plan: Plan, named: Iterable[str], steps: list[Step], *, by_times: bool = False
) -> None:
    """A named feature that is dropped nowhere, now or before, is a mistake: the user means another model or plan. Not
    where `auto` found by times that layers that have it are better left as they are."""
    gone = {feature for step in steps for feature in step.dropped}
    gone |= {feature for _, module in find_hosts(model) for feature in getattr(module, "given_up", ())}
    for feature in named:
        if feature in gone:
            continue
        having = {name for name, m in find_hosts(model) if any(ask.feature == feature for ask in asks_of(model, m))}
        if not having:
            others = ", ".join(sorted(droppable(model))) or "nothing that can be dropped"
            raise LinvitError(
                f"drop names {feature}, which no layer of this {type(model).__name__} has: it has {others}"
            )
        honouring = next((step.mechanism.name for step in steps if step.name in having), None)
        if honouring is None:
            if by_times:
                continue
            raise LinvitError(f"drop names {feature}, but plan {plan.name} converts no layer that has it")
        raise LinvitError(
            f"drop names {feature}, which {honouring} honours and which cannot be taken out: leave it out"
        )


def current_mechanism(module: nn.Module) -> str:
    """The name of the mechanism an attention module has now."""
    if isinstance(module, Host):
        return module.mechanism.name
    return host_of(module).native


def without(module: nn.Module, features: tuple[str, ...]) -> nn.Module:
    """The module as it is with these features taken out. It shares the rest with the module, which stays as it is."""
    if not features:
        return module
    twin = copy.copy(module)
    for kind in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[kind] = dict(getattr(module, kind))
    for feature in features:
        host_of(module).give_up(twin, feature)
    return twin


def build_mechanism(module: nn.Module, choice: Choice, grid: TokenGrid | None, impl: str) -> Mechanism:
    """The mechanism for one host, on its device and in its dtype."""
    host = host_of(module)
    shape = host.shape(module)
    shape = replace(shape, grid=grid or shape.grid)
    options = {**host.defaults(module, choice.mechanism), **choice.options}
    mechanism = create_attention(choice.mechanism, **vars(shape), impl=impl, **options)
    like = next(module.parameters())
    return mechanism.to(device=like.device, dtype=like.dtype).train(module.training)


def check(name: str, unmet: list[Ask], mechanism: Mechanism, between: bool) -> None:
    """An error where a mechanism has no place in this host, whatever is dropped."""
    if mechanism.capabilities.between and not between:
        raise LinvitError(f"{mechanism.name} adds a step between attention and MLP, which {name} has no place for")
    for ask in unmet:
        if not ask.droppable:
            raise LinvitError(f"{mechanism.name} cannot serve {name}: it has {ask.feature}")


def install(model: nn.Module, steps: Iterable[Step]) -> None:
    """Make the modules hosts of their mechanisms, in place and without what is dropped, and prepare the model."""
    kinds = set()
    for step in steps:
        module, host = step.module, host_of(step.module)
        for feature in step.dropped:
            host.give_up(module, feature)
        module.__class__ = host
        assert isinstance(module, Host)
        module.mechanism = step.mechanism
        module.given_up = tuple(dict.fromkeys((*module.given_up, *step.dropped)))
        kinds.add(host)
    for kind in kinds:
        kind.prepare(model)


def own_size(model: Any) -> tuple[int, int]:
    """The image size a model is meant for: the one it was built for, else as timm or Hugging Face notes it. A model of
    any size that was trained at another than it was built for notes both."""
    noted = getattr(model, "pretrained_cfg", None) or {}
    size: Any = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is None or noted.get("built_for") == size:
        size = noted.get("input_size")
    size = size or size_in(getattr(model, "config", None)) or 224
    return (size, size) if isinstance(size, int) else tuple(size[-2:])


def size_in(config: Any) -> Any:
    """The image size in a config of Hugging Face, the model's or that of the part that sees."""
    inside = (getattr(config, name, None) for name in ("vision_config", "backbone_config"))
    sizes = (size_in(part) for part in inside if part is not None)
    return getattr(config, "image_size", None) or next((size for size in sizes if size), None)


def probe_grids(
    model: nn.Module,
    hosts: list[tuple[str, nn.Module]],
    choices: list[Choice | None],
    becoming: Mapping[str, nn.Module],
    size: tuple[int, int] | None,
) -> dict[str, TokenGrid]:
    """The grid each host will see, where a chosen mechanism has parameters laid out for it: one pass on the meta
    device. `becoming` are the hosts as they will be."""
    if not any(choice is not None and mechanism_class(choice.mechanism).builds_on_grid for choice in choices):
        return {}
    size = size or own_size(model)
    found: dict[str, TokenGrid] = {}
    image = Grids()
    handles = []
    for owner in model.modules():
        if stem(owner) is not None:
            handles += image.follow(owner)
            image.owner = model if type(owner).__module__.startswith("transformers.") else owner
    inside: dict[nn.Module, Grids] = {}
    for kind in {host_of(module) for _, module in hosts}:
        for found_here in watch(model, kind):
            handles += found_here.handles
            inside.update(dict.fromkeys(found_here.modules, found_here.grids))
    for name, module in hosts:
        host = host_of(module)

        def see(module: nn.Module, args: Any, named: dict[str, Any], name: str = name, host: type[Host] = host) -> None:
            grid = host.grid(becoming.get(name, module), (*args, *named.values()), inside.get(module, image))
            if grid is not None:
                found[name] = grid

        handles.append(module.register_forward_pre_hook(see, with_kwargs=True))
    try:
        with told(size):
            dry_run(model, size)
    finally:
        for handle in handles:
            handle.remove()
    return found
