"""`linvit compare`: the fair comparison of mechanisms, on one machine or many."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from linvit.cli import arguments
from linvit.cli.output import INTERRUPTED, Json, print_json, say, screen
from linvit.cli.train import first_process
from linvit.errors import LinvitError

if TYPE_CHECKING:
    from linvit.comparison.scheduling.scheduler import Watch
    from linvit.comparison.scheduling.store import Store


def compare(
    what: Annotated[str, typer.Argument(help="A preset, a TOML file or a result file; else go on with STORE.")] = "",
    output: Annotated[Path | None, arguments.output("STORE", "Where results go.")] = None,
    mode: Annotated[str, typer.Option(help="scratch, or distil from one softmax teacher.")] = "",
    task: Annotated[str, typer.Option(help="features: of distil, learn the teacher's features without labels.")] = "",
    model: Annotated[str, typer.Option(help="fair, vit, a timm model, or a head to detect or segment with.")] = "",
    model_arg: arguments.ModelArg = None,
    backbone: Annotated[str, typer.Option(metavar="MODEL_OR_DIR", help="What a head stands on.")] = "",
    plan: Annotated[str, typer.Option(help="Plans and mechanisms, such as softmax,mixa:keep=2,all")] = "",
    data: arguments.Data = "",
    root: Annotated[str, typer.Option(metavar="DIR", help="Where a named set lies.")] = "",
    recipe: arguments.Recipe = "",
    set_: arguments.Settings = None,
    seeds: Annotated[str, typer.Option(help="With commas, such as 0,1,2.")] = "",
    patch_size: Annotated[str, typer.Option(help="Of the patch embedding, with commas, such as 4,8.")] = "",
    size: Annotated[str, typer.Option(help="Image sizes to train at, with commas.")] = "",
    teacher: arguments.Teacher = "",
    engine: Annotated[str, typer.Option(help="local (this process), gpus (this machine), ray, or auto.")] = "auto",
    per_gpu: Annotated[int, typer.Option(min=1, help="How many runs share a GPU, or the CPU where there is none.")] = 1,
    address: Annotated[str, typer.Option(help="Of the Ray cluster; auto, or local for one of this machine.")] = "",
    cpus: Annotated[int | None, typer.Option(min=1, help="Processors that a run reserves of a Ray cluster.")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="KEY", help="Only this job, and what it needs.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Try again what failed.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the grid and about how long it takes.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print a preset's file, to copy and change.")] = False,
    merge: Annotated[list[Path] | None, typer.Option(metavar="OTHER", help="First add another store.")] = None,
    pack: Annotated[
        Path | None, typer.Option(metavar="FILE.tar.xz", parser=arguments.path, help="At the end, pack STORE.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare mechanisms fairly: same architecture, recipe, data and seeds; only the attention changes.

    Every run ends as a file in STORE, and the report as STORE/report.html. What was killed goes on, what is finished is
    never repeated, what fails is noted and stops nothing. Several machines may work on one STORE, or each on its own,
    merged later; a store travels as one archive, too. Of mode distil, without a teacher one is trained first.

    \b
    Example: linvit compare digits -o runs/digits
    """
    if show:
        print_preset(what, as_json)
        return
    from linvit.cli.compare_output import bars, lines, print_grid, print_left_out, print_summary
    from linvit.comparison.description.request import pick, read_request
    from linvit.comparison.scheduling import travel
    from linvit.comparison.scheduling.places.choice import choose
    from linvit.comparison.scheduling.store import Store
    from linvit.conversion.plan import split_plans

    if model_arg and not model:
        raise LinvitError("--model-arg sets something of a model: give --model too")
    given: dict[str, Any] = {"mode": mode, "data": data, "root": root, "recipe": recipe, "teacher": teacher}
    given |= {"backbone": backbone, "task": task}
    given |= {"plans": tuple(split_plans(plan)), "settings": tuple(set_ or ())}
    given["architecture"] = {"model": model, **arguments.pairs(model_arg, "--model-arg")} if model else {}
    for name, text in (("seeds", seeds), ("patch_size", patch_size), ("size", size)):
        given[name] = tuple(arguments.numbers(text, least=0 if name == "seeds" else 1)) if text else ()
    changes = {name: value for name, value in given.items() if value}  # a flag that is not given says nothing
    work = choose(engine, per_gpu=per_gpu, address=address, cpus=cpus)
    if output is None and (not dry_run or merge or pack):
        raise LinvitError("say where results go: linvit compare digits -o runs/digits")
    store = None if output is None else Store(output)
    merged = [(other, travel.merge(store, other)) for other in merge or ()] if store is not None else []
    if store is not None and (merge or pack) and not (what or changes or dry_run):
        close(store, pack, merged, as_json)
        return
    request = read_request(what, changes, store.comparisons() if store and not what else (), guess=dry_run)
    jobs = pick(request.jobs, only or [])
    if dry_run:
        print_grid(jobs, request, store, as_json)
        return
    assert store is not None
    for comparison in request.comparisons:
        store.ask(comparison)
    first = first_process()
    if first:
        print_left_out(request, sys.stderr)
    try:
        quiet: Watch | None = None if first and not as_json else lambda job, record: None
        with screen(quiet, partial(bars, jobs, store), partial(lines, jobs, store)) as watch:
            summary = work(jobs, store, watch=watch, retry=retry)
    except KeyboardInterrupt:
        done = sum(store.finished(job) for job in jobs)
        typer.echo(f"stopped: {done} of {len(jobs)} jobs are finished, the same command goes on", err=True)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        if pack is not None and first:
            travel.pack(store, pack, work=True)
    if first:
        print_summary(jobs, store, summary, as_json)
    if not summary.complete:
        raise typer.Exit(1)


def print_preset(name: str, as_json: bool) -> None:
    from linvit.comparison.description.spec import load, preset_text, presets

    if not name:
        print_json(presets()) if as_json else print(*presets(), sep="\n")
    elif as_json:
        print_json(load(name).to_dict())
    else:
        print(preset_text(name), end="")


def close(store: "Store", pack: Path | None, merged: list[tuple[Path, dict[str, int]]], as_json: bool) -> None:
    """Say what was merged, and pack."""
    from linvit.comparison.scheduling import travel

    packed = travel.pack(store, pack, work=True) if pack is not None else None
    if as_json:
        added = [{"store": str(other), "added": counts} for other, counts in merged]
        print_json({"store": str(store.folder), "merged": added, "packed": packed, "notes": store.notes})
        return
    for other, counts in merged:
        words = [f"{n} {name if n > 1 else name.removesuffix('s')}" for name, n in counts.items() if n]
        say(f"{other}: {', '.join(words) or 'nothing'} new")
    if packed is not None:
        say(f"{pack}: {packed} files")
    for note in store.notes:
        say(note, err=True)
