"""The rows of a result file put side by side: one line per shape and pass, ratios against what a user would pick."""

from __future__ import annotations

from typing import Any

from linvit.measurement.speed import IMPLEMENTATIONS, OpShape, floor_ms, time_of

OTHERS = IMPLEMENTATIONS[1:]


def compare_op(result: dict[str, Any]) -> list[dict[str, Any]]:
    """For each shape and pass: the floor, our time over it, and how many times faster we are than each other."""
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        where = (row["batch"], row["heads"], row["head_dim"], row["tokens"], row.get("bias", False), row["pass"])
        groups.setdefault(where, {})[row["implementation"]] = row
    lines = []
    for (*sizes, which), rows in groups.items():
        shape = OpShape(*sizes)
        times = {name: time_of(row) for name, row in rows.items()}
        floor = floor_ms(shape, which, result["dtype"], result["bandwidth"])
        ours = times.get("ours")
        line: dict[str, Any] = {"shape": shape, "pass": which, "floor_ms": floor, "ms": times, "rows": rows}
        line["times_floor"] = _over(ours, floor)
        line["faster_than"] = {name: _over(times.get(name), ours) for name in OTHERS}
        lines.append(line)
    return lines


def compare_models(result: dict[str, Any]) -> list[dict[str, Any]]:
    """For each resolution, pass and mode: images per second of both, their ratio, and the ratio of the peaks."""
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        groups.setdefault((row["resolution"], row["batch"], row["pass"], row["mode"]), {})[row["attention"]] = row
    lines = []
    for (resolution, batch, which, mode), rows in groups.items():
        softmax, converted = rows.get("softmax"), rows.get("converted")
        line: dict[str, Any] = {"resolution": resolution, "batch": batch, "pass": which, "mode": mode, "rows": rows}
        line["ratio"] = line["memory_ratio"] = None
        if softmax and converted and softmax["status"] == converted["status"] == "ok":
            line["ratio"] = converted["images_per_second"] / softmax["images_per_second"]
            line["memory_ratio"] = converted["peak_bytes"] / softmax["peak_bytes"]
        lines.append(line)
    return lines


def _over(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b
