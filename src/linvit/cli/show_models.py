"""`linvit show maps` and `linvit show features`: what models make of photographs."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from linvit.cli import arguments
from linvit.cli.output import Json, console, print_json, progress, say, table
from linvit.errors import LinvitError, unknown

if TYPE_CHECKING:
    from torch import nn

    from linvit.conversion import Plan
    from linvit.figures.attention.choosing import Query
    from linvit.figures.attention.drawing import LayerNumbers
    from linvit.figures.photographs import View

# What the papers' figures set beside each other.
FIGURES = {
    "qtvit": "taylor,relu_linear,qt:variant=exact,qt",
    "castling": "angular,castling",
    "mobile": "mobile:small_head_dim=null,mobile:competition=false,mobile",
}

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A timm model, or a folder that linvit saved.")]
Images = Annotated[list[Path], typer.Argument(metavar="IMAGE…", help="Photographs.")]
Plans = Annotated[
    str, typer.Option("--plan", metavar="PLANS", help="Beside it, the model converted: stella,mixa:keep=6.")
]
Others = Annotated[list[str] | None, typer.Option("--with", metavar="MODEL_OR_DIR", help="Beside it, another model.")]
At = Annotated[str, typer.Option(metavar="X,Y", help="The patch at a pixel of the photograph.")]
Checkpoint = Annotated[Path | None, typer.Option(metavar="FILE", help="Weights to use instead of timm's.")]


@dataclass(frozen=True)
class Asked:
    """The models to show, by what they are called in the picture."""

    models: "dict[str, nn.Module]"
    views: "list[View]"


def open_all(
    model: str, images: Sequence[Path], plans: str, others: Sequence[str], drop: str, size: str,
    checkpoint: Path | None, pretrained: bool, model_arg: list[str] | None, device: str, lenient: Sequence[str] = (),
) -> Asked:  # fmt: skip
    """The model, what plans make of it, and others; and the photographs at the first one's size. `lenient` plans leave
    the layers that they cannot serve as they are."""
    import copy

    from linvit.conversion import convert, open_model, parse_plan, resample
    from linvit.conversion.convert import current_mechanism, find_hosts, no_hosts
    from linvit.conversion.plan import split_plans
    from linvit.figures.photographs import input_size, read_photograph, view

    place = arguments.find_device(device)
    photographs = [read_photograph(path) for path in images]
    pixels, args = arguments.image_size(size) if size else None, arguments.pairs(model_arg, "--model-arg")
    instead = "--checkpoint FILE or --no-pretrained"
    found: dict[str, nn.Module] = {}

    def add(name: str, built: "nn.Module") -> None:
        if not find_hosts(built):
            raise no_hosts(built)
        number = sum(known.partition(" #")[0] == name for known in found)
        found[f"{name} #{number + 1}" if number else name] = built.to(place).eval()

    first = open_model(model, pretrained=pretrained, args=args, checkpoint=checkpoint, instead=instead)
    resample(first, size=pixels)
    mechanisms = dict.fromkeys(current_mechanism(module) for _, module in find_hosts(first))
    add(" + ".join(list(mechanisms)[:2]), first)
    with arguments.dropping(drop) as given_up:
        for text in split_plans(plans):
            converted = copy.deepcopy(first)
            chosen = parse_plan(text)
            if text in lenient:
                chosen = where_it_serves(converted, chosen, input_size(first, pixels))
            convert(converted, chosen, drop=given_up, size=input_size(first, pixels))
            add(text, converted)
    for name in others:
        built = open_model(name, pretrained=pretrained, instead=instead)
        resample(built, size=pixels)
        add(Path(name).name, built)
    wanted = input_size(first, pixels)
    return Asked(found, [view(p, path.stem, wanted) for p, path in zip(photographs, images, strict=True)])


def where_it_serves(model: "nn.Module", plan: "Plan", size: tuple[int, int]) -> "Plan":
    """The plan for the layers that it can serve, giving up what it must."""
    from linvit.conversion.convert import find_hosts, find_steps
    from linvit.conversion.host import FEATURES
    from linvit.conversion.planning.costs import with_choices

    choices = plan.choices([name for name, _ in find_hosts(model)])
    kept = []
    for index, choice in enumerate(choices):
        alone = with_choices(plan.name, [choice if i == index else None for i in range(len(choices))], tuple(FEATURES))
        try:
            find_steps(model, alone, (), size=size)
        except LinvitError:
            choice = None
        kept.append(choice)
    if not any(kept):
        raise LinvitError(f"plan {plan.name} can serve no layer of this {type(model).__name__}")
    return with_choices(plan.name, kept, tuple(FEATURES))


def maps(
    model: Model,
    images: Images,
    plan: Plans = "",
    other: Others = None,
    figure: Annotated[str, typer.Option(help="The plans of a paper's figure: qtvit, castling or mobile.")] = "",
    at: At = "",
    token: Annotated[str, typer.Option(help="class: the class token.")] = "",
    pooled: Annotated[bool, typer.Option("--pooled", help="The mean over all queries.")] = False,
    layer: Annotated[str, typer.Option(help="Layers by number or name, with commas, or all.")] = "",
    head: Annotated[str, typer.Option(help="mean, all, or a head's number.")] = "mean",
    rollout: Annotated[bool, typer.Option("--rollout", help="Attention rollout up to the layer.")] = False,
    output: Annotated[Path, arguments.output("FILE", "The picture.")] = Path("maps.png"),
    drop: arguments.Drop = "",
    size: arguments.Size = "",
    checkpoint: Checkpoint = None,
    pretrained: arguments.Pretrained = True,
    model_arg: arguments.ModelArg = None,
    device: arguments.Device = "auto",
    as_json: Json = False,
) -> None:
    """Draw attention maps on photographs, of any mechanism, and tell what they are like layer by layer.

    A linear mechanism has a map too, the one that its two products imply; its rows are computed one by one, so large
    images do. Beside the model stand what --plan makes of it and the models of --with. The query is the class token, or
    the middle of the photograph where there is none; the layer is the last that sees the whole picture. A number under
    a map is its peak over an even share. --figure sets beside each other what a paper's figure does, in the layers that
    its mechanisms can serve. What is drawn of a photograph is its middle, as the model sees it.

    \b
    Example: linvit show maps deit_tiny_patch16_224 cat.jpg --plan stella,mixa:keep=6 --at 120,80 -o maps.png
    """
    from linvit.figures.attention.comparing import compare_maps
    from linvit.figures.attention.drawing import draw_maps
    from linvit.figures.style import check_picture

    check_picture(output)
    query = chosen_query(at, token, pooled)
    if figure and figure not in FIGURES:
        raise unknown("figure", figure, FIGURES)
    papers = FIGURES.get(figure, "")
    plans = ",".join(text for text in (papers, plan) if text)
    options = (drop, size, checkpoint, pretrained, model_arg, device)
    asked = open_all(model, images, plans, other or [], *options, papers.split(",") if papers else ())
    which = [name.strip() for name in layer.split(",") if name.strip()]
    with progress("looking", len(asked.models) * len(images)) as advance:
        found = compare_maps(asked.models, asked.views, query, which, head, rollout, advance)
    kind = "Attention rollout" if rollout else "Attention"
    draw_maps(found.rows, found.numbers, output, f"{kind} of {Path(model).name} {found.query}")
    if as_json:
        layers = {name: [row.as_dict() for row in rows] for name, rows in found.numbers.items()}
        print_json({"model": model, "plot": str(output), "query": found.query, "layers": layers, "notes": found.notes})
        return
    print_numbers(found.numbers)
    for name, note in found.notes.items():
        console().print(f"{name}: {note}", style="italic")
    say(f"Plot: {output}")


def chosen_query(at: str, token: str, pooled: bool) -> "Query | None":
    """Whose rows are shown; none is left to the model."""
    from linvit.figures.attention.choosing import Query

    if sum((bool(at), bool(token), pooled)) > 1:
        raise LinvitError("--at, --token and --pooled each name the query: give one of them")
    if token not in ("", "class"):
        raise unknown("token", token, ["class"])
    if at:
        return Query(at=pixel(at))
    return Query(pooled=pooled) if pooled or token else None


def pixel(text: str) -> tuple[float, float]:
    """`120,80` as x and y."""
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise LinvitError(f"expected a pixel such as 120,80 (x first), got '{text}'") from None
    return x, y


def print_numbers(numbers: "dict[str, list[LayerNumbers]]") -> None:
    out = console()
    for name, layers in numbers.items():
        rows = []
        for row in layers:
            own, apart = row.statistics, row.distance
            told = ("", "") if apart is None else (f"{apart.total_variation:.3f}", f"{apart.cosine:.3f}")
            cells = (f"{own.entropy:.2f}", f"{own.effective_rank:.1f}", f"{own.distance:.0f}", *told)
            rows.append((row.index, row.name, row.mechanism, *cells))
        out.print(name, style="bold")
        widths = {"layer": -5, "name": 18, "mechanism": 12, "entropy": -7, "rank": -6, "pixels": -6}
        out.print(table(rows, **widths, **({"variation": -9, "cosine": -6} if any(r.distance for r in layers) else {})))


def features(
    model: Model,
    images: Images,
    plan: Plans = "",
    other: Others = None,
    at: At = "",
    layer: Annotated[str, typer.Option(help="The layer whose block's features are shown; the last.")] = "",
    output: Annotated[Path, arguments.output("FILE", "The picture.")] = Path("features.png"),
    drop: arguments.Drop = "",
    size: arguments.Size = "",
    checkpoint: Checkpoint = None,
    pretrained: arguments.Pretrained = True,
    model_arg: arguments.ModelArg = None,
    device: arguments.Device = "auto",
    as_json: Json = False,
) -> None:
    """Draw patch features as colours, and how alike they are to one patch's.

    Colours are the first three principal components of the first model's features over all photographs, the same basis
    for every model: where a converted model's picture has the original's colours, its features are the original's. The
    cosine is between each patch and the one at X,Y, the middle unless told.

    \b
    Example: linvit show features vit_small_patch16_dinov3 cat.jpg --plan relu_linear -o features.png
    """
    from linvit.figures.attention.features import compare_features, draw_features
    from linvit.figures.style import check_picture

    check_picture(output)
    place = pixel(at) if at else None
    asked = open_all(model, images, plan, other or [], drop, size, checkpoint, pretrained, model_arg, device)
    found = compare_features(asked.models, asked.views, place, layer)
    draw_features(found, output, f"Patch features of {Path(model).name} behind {found.layer}")
    if as_json:
        print_json({"model": model, "plot": str(output), "layer": found.layer, "similarity": found.similarity})
        return
    rows = ((name, f"{cosine:.4f}") for name, cosine in found.similarity.items())
    console().print(table(rows, **{"model": 24, "mean cosine to the first": -8}))
    say(f"Plot: {output}")
