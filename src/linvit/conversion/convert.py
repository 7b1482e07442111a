"""Swap the attention of a model by a plan: in place, every weight kept, and a report of what changed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from linvit.attention import Mechanism, TokenGrid, create_attention, mechanism_class
from linvit.attention.local import begin_at_zero
from linvit.conversion.host import Ask, Grids, Host, stem
from linvit.conversion.hosts import host_for, host_of
from linvit.conversion.pictures import watch
from linvit.conversion.plan import Choice, Plan, as_plan
from linvit.errors import LinvitError, NotHonoured

if TYPE_CHECKING:
    from linvit.conversion.sensitivity import Sensitivity


@dataclass(frozen=True)
class Layer:
    """What happened to one host."""

    index: int
    name: str
    before: str
    after: str
    dropped: tuple[str, ...] = ()
    kept: str = ""  # why the plan's mechanism has no place here

    def __str__(self) -> str:
        dropped = f"  (gave up {', '.join(self.dropped)})" if self.dropped else ""
        kept = f"  (left as it is: {self.kept})" if self.kept else ""
        return f"{self.index:3d}  {self.name}: {self.before} → {self.after}{dropped}{kept}"


@dataclass(frozen=True)
class Report:
    """What a conversion did, layer by layer."""

    plan: str
    layers: tuple[Layer, ...] = ()
    new_parameters: int = 0
    removed: tuple[str, ...] = field(default=())
    sensitivity: Sensitivity | None = None

    def __str__(self) -> str:
        changed = sum(layer.before != layer.after for layer in self.layers)
        head = (
            f"plan {self.plan}: {changed} of {len(self.layers)} layers changed, {self.new_parameters:,} new parameters"
        )
        gone = [f"removed {len(self.removed)} parameters of dropped features"] if self.removed else []
        return "\n".join([head, *(f"  {layer}" for layer in self.layers), *gone])


def find_hosts(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The attention modules that can be converted, with their names, in the order of the model."""
    return [(name, module) for name, module in model.named_modules() if host_for(module) is not None]


def convert(
    model: nn.Module,
    plan: str | Plan,
    *,
    drop: Iterable[str] = (),
    input_size: tuple[int, int] | None = None,
    calibrate: Iterable[Any] | None = None,
    impl: str = "auto",
    quiet: bool = True,
    **options: Any,
) -> Report:
    """Give the model's attention layers the mechanisms of a plan.

    `plan` is a Plan, the name of one (`mixa`, `castling`, …) or a mechanism's name; `options` go to it. What a
    mechanism cannot honour (a relative bias, say) is an error unless `drop` names it. `input_size` is the image size
    that learned positions are laid out for; the model's own by default. `calibrate`, batches of images, measures which
    layers `mixa` keeps quadratic. With `quiet` the local branches that mechanisms bring along start at zero, as suits
    pretrained weights; a model to be trained from scratch wants them as their papers do. Nothing is touched before
    everything fits.
    """
    measured = None
    if calibrate is not None:
        measured = measure_for_mixa(model, plan, calibrate, {*drop}, options)
        options = {**options, "keep": measured.keep}
    plan = as_plan(plan, **options)
    hosts = find_hosts(model)
    if not hosts:
        raise LinvitError(f"{type(model).__name__} has no attention that linvit can swap")
    given_up = {*drop, *plan.drop}
    choices = plan.choices([name for name, _ in hosts])
    grids = probe_grids(model, hosts, choices, input_size)
    steps, kept = [], {}
    for (name, module), choice in zip(hosts, choices, strict=True):
        if choice is None:
            continue
        mechanism = build_mechanism(module, choice, grids.get(name), impl)
        if quiet:
            begin_at_zero(mechanism)
        asks = [ask for ask in asks_of(model, module) if not ask.honoured_by(mechanism)]
        if any(ask.keeps for ask in asks):
            kept[name] = next(ask.feature for ask in asks if ask.keeps)
            continue
        steps.append((name, module, choice, mechanism, check(name, asks, mechanism, host_of(module).between)))
    lacking = [(m.name, name, f) for name, _, _, m, dropped in steps for f in dropped if f not in given_up]
    if lacking:
        features = list(dict.fromkeys(feature for *_, feature in lacking))
        first, name, _ = lacking[0]
        raise NotHonoured(f"{first} cannot honour the {' and '.join(features)} from {name} on", features)
    before = {name for name, _ in model.named_parameters()}
    was = {name: current_mechanism(module) for name, module in hosts}
    install(model, hosts, [(module, mechanism, dropped) for _, module, _, mechanism, dropped in steps])
    remember(model, plan, given_up, input_size)
    after = dict(model.named_parameters())
    done = {name: (str(choice), dropped) for name, _, choice, _, dropped in steps}
    return Report(
        plan.name,
        tuple(
            Layer(i, name, was[name], *done.get(name, (was[name], ())), kept.get(name, ""))
            for i, (name, _) in enumerate(hosts)
        ),
        sum(p.numel() for n, p in after.items() if n not in before),
        tuple(sorted(before - after.keys())),
        measured,
    )


def measure_for_mixa(
    model: nn.Module, plan: str | Plan, loader: Iterable[Any], drop: set[str], options: dict[str, Any]
) -> Sensitivity:
    """The sensitivity that tells which layers MixA keeps, for `calibrate`."""
    from linvit.conversion.sensitivity import measure_sensitivity

    if plan != "mixa" or not isinstance(options.get("keep", 6), int) or "where" in options:
        raise LinvitError("calibrate= measures which layers mixa keeps: give plan='mixa' and keep=<a number>")
    return measure_sensitivity(model, loader, keep=options.get("keep", 6), drop=drop | {*as_plan("mixa").drop})


def current_mechanism(module: nn.Module) -> str:
    """The name of the mechanism an attention module has now."""
    if isinstance(module, Host):
        return module.mechanism.name
    return host_of(module).native


def build_mechanism(module: nn.Module, choice: Choice, grid: TokenGrid | None, impl: str) -> Mechanism:
    """The mechanism for one host, on its device and in its dtype."""
    host = host_of(module)
    shape = host.shape(module)
    options = {**host.defaults(module, choice.mechanism), **choice.options}
    mechanism = create_attention(
        choice.mechanism,
        heads=shape.heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        dim=shape.dim,
        grid=grid or shape.grid,
        impl=impl,
        **options,
    )
    like = next(module.parameters())
    return mechanism.to(device=like.device, dtype=like.dtype).train(module.training)


def asks_of(model: nn.Module, module: nn.Module) -> list[Ask]:
    """What an attention module of this model does beyond a plain mechanism."""
    return host_of(module).asks_in(model, module)


def check(name: str, asks: list[Ask], mechanism: Mechanism, between: bool) -> tuple[str, ...]:
    """The features to give up here, or an error naming what cannot be."""
    if mechanism.capabilities.between and not between:
        raise LinvitError(f"{mechanism.name} adds a step between attention and MLP, which {name} has no place for")
    for ask in asks:
        if not ask.droppable:
            raise LinvitError(f"{mechanism.name} cannot serve {name}: it has {ask.feature}")
    return tuple(ask.feature for ask in asks)


def swap(module: nn.Module, mechanism: Mechanism, dropped: tuple[str, ...]) -> None:
    """Make the module a host of the mechanism, in place."""
    host = host_of(module)
    for feature in dropped:
        host.give_up(module, feature)
    module.__class__ = host
    assert isinstance(module, Host)
    module.mechanism = mechanism
    module.given_up = tuple(dict.fromkeys((*module.given_up, *dropped)))


def install(
    model: nn.Module,
    hosts: list[tuple[str, nn.Module]],
    steps: list[tuple[nn.Module, Mechanism, tuple[str, ...]]],
) -> None:
    """Swap each module's attention for its mechanism, then let the hosts prepare the model."""
    for module, mechanism, dropped in steps:
        swap(module, mechanism, dropped)
    for kind in {type(module) for module, *_ in steps}:
        assert issubclass(kind, Host)
        kind.prepare(model, hosts)


def remember(model: nn.Module, plan: Plan, drop: set[str], input_size: tuple[int, int] | None) -> None:
    """Note the conversion on the model, and where its weights came from if that is known; `linvit.save` writes it into
    the config."""
    done = {"plan": plan, "drop": sorted(drop), "input_size": input_size}
    if hasattr(model, "linvit_source"):
        done["source"] = model.linvit_source
    model.linvit_conversions = [*getattr(model, "linvit_conversions", []), done]  # type: ignore[assignment]


def own_size(model: Any) -> tuple[int, int]:
    """The image size a model is meant for: the one it was built for, else as timm or Hugging Face notes it. A model of
    any size that was trained at another than it was built for notes both."""
    noted = getattr(model, "pretrained_cfg", None) or {}
    size: Any = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is None or noted.get("built_for") == size:
        size = noted.get("input_size")
    size = size or getattr(getattr(model, "config", None), "image_size", 224)
    return (size, size) if isinstance(size, int) else tuple(size[-2:])


def probe_grids(
    model: nn.Module,
    hosts: list[tuple[str, nn.Module]],
    choices: list[Choice | None],
    input_size: tuple[int, int] | None,
) -> dict[str, TokenGrid]:
    """The grid each host sees, where a chosen mechanism has parameters laid out for it: one pass on the meta device."""
    if not any(choice is not None and mechanism_class(choice.mechanism).builds_on_grid for choice in choices):
        return {}
    size = input_size or own_size(model)
    found: dict[str, TokenGrid] = {}
    image = Grids()
    handles = []
    for owner in model.modules():
        if stem(owner) is not None:
            handles += image.follow(owner)
            image.owner = owner
    inside: dict[nn.Module, Grids] = {}
    for kind in {host_of(module) for _, module in hosts}:
        for found_here in watch(model, kind):
            handles += found_here.handles
            inside.update(dict.fromkeys(found_here.modules, found_here.grids))
    for name, module in hosts:
        host = host_of(module)

        def see(module: nn.Module, args: Any, named: dict[str, Any], name: str = name, host: type[Host] = host) -> None:
            grid = host.grid(module, (*args, *named.values()), inside.get(module, image))
            if grid is not None:
                found[name] = grid

        handles.append(module.register_forward_pre_hook(see, with_kwargs=True))
    # Every module once: functional_call would not put back what it finds under two names (CoaT shares modules).
    meta = {
        f"{owner}.{name}" if owner else name: tensor.to("meta")
        for owner, module in model.named_modules()
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }
    channels = getattr(model, "in_chans", 3)
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            picture = torch.empty(1, channels, *size, device="meta")
            try:
                torch.func.functional_call(model.eval(), meta, (picture,), tie_weights=False)
            except (RuntimeError, NotImplementedError):  # a model that looks at its data, as Gemma 4 for padding
                model(torch.zeros_like(picture, device=next(model.parameters()).device))
    finally:
        model.train()  # timm's LeViT forgets the biases it cached in evaluation mode only so
        for module, training in modes:
            module.training = training
        for handle in handles:
            handle.remove()
    return found
