"""The tables that `linvit bench` prints."""

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console

from linvit.cli.output import table
from linvit.measurement.dense_speed import PARTS, compare_dense
from linvit.measurement.model_speed import compare_models
from linvit.measurement.speed import OTHERS, compare_op

MEBI = 2**20


def print_op(result: dict[str, Any]) -> None:
    """One line per shape and pass. `×` beside another implementation is how many times faster ours is."""
    bandwidth = f"memory copied at {result['bandwidth'] / 1e12:.3g} TB/s"
    print(f"{result['mechanism']} in {result['dtype']} {where(result)}, {bandwidth}; milliseconds")
    headings = ["batch, heads, head dim, tokens", "pass", "floor", "ours", "× floor", *OTHERS]
    made = []
    for line in compare_op(result):
        rows, cells = line["rows"], [str(line["shape"]), line["pass"], digits(line["floor_ms"])]
        cells += [_if_ok(rows.get("ours"), _timed), number(line["times_floor"])]
        for name in OTHERS:
            faster = line["faster_than"][name]
            cells.append(_if_ok(rows.get(name), _timed) + ("" if faster is None else f" ({number(faster)}×)"))
        right = [row if row and row["status"] == "ok" else None for row in (rows.get("ours"), rows.get("sdpa"))]
        cells.append(" / ".join(f"{row['peak_bytes'] / MEBI:.3g}" if row else "–" for row in right))
        cells.append(" / ".join(digits(row["eager_ms"]["median"]) if row else "–" for row in right))
        made.append(cells)
    print_table(made, *headings, "peak MiB, ours / sdpa", "eager, ours / sdpa")
    reasons = Counter(row["why_reference"] for row in result["rows"] if "why_reference" in row)
    for reason, rows in reasons.items():
        print(f"{rows} rows of ours were measured on the plain reference: {reason.partition('; use impl')[0]}")


def print_model(result: dict[str, Any]) -> None:
    print(f"{result['model']} to {result['to']} in {result['dtype']} {where(result)}")
    made = []
    for line in compare_models(result):
        pair = [line["rows"].get(name) for name in ("softmax", "converted")]
        speeds = [_if_ok(row, lambda row: digits(row["images_per_second"])) for row in pair]
        cells = [line["resolution"], line["batch"], line["pass"], line["mode"], *speeds]
        made.append([*cells, number(line["ratio"]), number(line["memory_ratio"])])
    print_table(
        made, "pixels", "batch", "pass", "mode", "softmax, images/s", "converted, images/s", "ratio", "peak ratio"
    )


def print_dense(result: dict[str, Any]) -> None:
    """One line per model: the whole, and of inference its parts, in milliseconds and in GMACs of an image."""
    print(f"{result['model']} in {result['dtype']} {where(result)}")
    parts, made = f"{', '.join(PARTS)}", []
    for line in compare_dense(result):
        cells = [line["resolution"], line["batch"], line["pass"], line["mode"], line["attention"]]
        cells.append(_if_ok(line, lambda row: digits(row["images_per_second"])))
        cells += [number(line["ratio"]), number(line["memory_ratio"])]
        times = {part: timing["median"] for part, timing in line.get("parts_ms", {}).items()}
        counts = {part: macs / 1e9 for part, macs in line.get("macs", {}).items()}
        cells += [_by_part(times), _by_part(counts)]
        made.append(cells)
    shown = ("pixels", "batch", "pass", "mode", "attention", "images/s", "ratio", "peak ratio")
    print_table(made, *shown, f"{parts}, ms", "same, GMACs")


def _by_part(values: dict[str, float]) -> str:
    return " / ".join(digits(values[part]) if part in values else "–" for part in PARTS) if values else ""


def print_scaling(results: list[dict[str, Any]]) -> None:
    headings = [f"{tokens:,} tokens" for tokens in results[0]["tokens"]] if results else []
    made = []
    for r in results:
        times, over = (f"{ms:.2f} ms" for ms in r["ms"]), "" if r["linear"] else f"over {r['limit']}"
        made.append((r["mechanism"], r["variant"], *times, f"{r['ratio']:.2f}", over))
    print_table(made, "mechanism", "variant", *headings, "ratio", "")


def where(result: dict[str, Any]) -> str:
    return f"on {result['environment']['hardware']}, torch {result['environment']['torch']}"


def print_table(rows: Iterable[Iterable[object]], *headings: str) -> None:
    """A table at the terminal's width, or as wide as it is when the output goes to a file."""
    Console(width=None if Console().is_terminal else 200, markup=False).print(table(rows, **dict.fromkeys(headings, 0)))


def digits(value: float) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _if_ok(row: dict[str, Any] | None, text: Callable[[dict[str, Any]], str]) -> str:
    """What a row says; its status where the check or the run failed, nothing where it was not asked for."""
    return "" if row is None else text(row) if row["status"] == "ok" else row["status"]


def _timed(row: dict[str, Any]) -> str:
    """Median and half the distance of the quartiles."""
    timing = row.get("graph_ms", row["eager_ms"])
    spread = (timing["high"] - timing["low"]) / 2 / timing["median"]
    return f"{digits(timing['median'])} ±{spread:.0%}"


def print_training(result: dict[str, Any]) -> None:
    recipe = result["recipe"]
    setting = f"{recipe['recipe']}, {recipe['batch_size']} images a step, {recipe['precision']}"
    print(f"training {result['model']} by {setting} {where(result)}")
    whole, made = f"{recipe['epochs']:g} epochs, s", []
    usual = [row for row in result["rows"] if row["status"] == "ok" and row.get("loader") in (None, "resident")]
    softmax = next((row for row in usual if row["attention"] == "softmax"), None)
    for row in result["rows"]:
        name = f"{row['attention']}, {row['loader']}" if "loader" in row else row["attention"]
        if row["status"] != "ok":
            made.append((name, row["status"], "", "", "", "", "", f"{row['error']:.1e}"))
            continue
        low, high = row["windows"]["low"], row["windows"]["high"]
        ratio = row["images_per_second"] / softmax["images_per_second"] if softmax else None
        peak = f"{row['peak_bytes'] / 2**30:.2f}" if row["peak_bytes"] else "–"
        speed = f"{row['images_per_second']:,.0f}"
        start = f"{row['first_window_seconds']:.0f}" if "first_window_seconds" in row else "–"
        seconds = f"{row['seconds']:,.1f}" if "seconds" in row else "–"  # older results have none
        cells = (speed, f"{low:,.0f} … {high:,.0f}", number(ratio), seconds, peak, start, f"{row['error']:.1e}")
        made.append((name, *cells))
    print_table(made, "attention", "images/s", "quartiles", "ratio", whole, "peak GiB", "start, s", "error")
