"""Numbers as people write them."""

from collections.abc import Sequence

SECONDARY = (  # in tables, beside the main one
    *("AP50", "AP75", "mask_mAP", "mask_AP50", "mask_AP75", "mAcc", "pAcc"),
    *("probe", "neighbours", "patch_cosine", "class_cosine"),
)


def metric_name(metric: str) -> str:
    """A metric as people write it: `top-1`, `mask mAP`."""
    return {"top1": "top-1", "knn": "kNN"}.get(metric, metric.replace("_", " "))


def minus(text: str) -> str:
    return text.replace("-", "−")


def count(number: float | None) -> str:
    return "–" if number is None else f"{number:,.0f}"


def in_words(number: int) -> str:
    """Up to twelve in words, as prose has them."""
    names = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
    return names[number] if 0 <= number < len(names) else count(number)


def accuracy(percent: float | None) -> str:
    return "–" if percent is None else f"{percent:.1f} %"


def points(number: float, *, sign: bool = False) -> str:
    """`1 point`, `−0.4 points`."""
    text = minus(f"{number:+.1f}") if sign else f"{number:g}"
    return f"{text} {'point' if number == 1 and not sign else 'points'}"


def interval(ends: tuple[float, float] | None) -> str:
    return "" if ends is None else minus(f"[{ends[0]:+.1f}, {ends[1]:+.1f}]")


def change(mean: float, ends: tuple[float, float] | None) -> str:
    """`−0.40 [−1.2, +0.4]`."""
    return f"{minus(f'{mean:+.2f}')} {interval(ends)}".strip()


def multiple(ratio: float) -> str:
    return f"{ratio:.1f}×" if ratio < 9.95 else f"{ratio:.0f}×"


def short(number: float | None) -> str:
    """Three digits and a letter for thousands, millions, billions."""
    if number is None:
        return "–"
    for unit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= unit:
            return f"{three(number / unit)} {letter}"
    return three(number)


def three(number: float | None) -> str:
    """Three significant digits without an exponent where one can do without."""
    if number is None:
        return "–"
    if number and not 1e-3 <= abs(number) < 1e5:
        return minus(f"{number:.1e}")
    size = abs(number)
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    return minus(f"{number:,.{digits}f}")


def megabytes(number: float | None) -> str:
    return "–" if number is None else f"{three(number / 2**20)} MiB"


def listing(words: Sequence[str]) -> str:
    """`a, b and c`."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""
