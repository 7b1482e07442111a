"""How metrics are written for people: which of a record's numbers, and under which names."""

from collections.abc import Mapping

NAMES = {
    **{"top1": "top-1", "top5": "top-5", "agreement": "agreement", "kl": "KL"},
    **{"mAP": "mAP", "AP50": "AP50", "mask_mAP": "mask mAP", "mask_AP50": "mask AP50"},
    **{"mIoU": "mIoU", "mAcc": "mAcc", "pAcc": "pAcc"},
    **{"patch_cosine": "patch cosine", "class_cosine": "class cosine", "neighbours": "neighbours"},
    **{"knn": "kNN", "probe": "probe"},
}
PERCENT = ("top1", "top5", "agreement", "neighbours", "knn", "probe")  # what is measured in percent
BARE = ("kl", "patch_cosine", "class_cosine")  # what is no share, nor shown as one; the others are shares


def shown_metrics(record: Mapping[str, float]) -> dict[str, str]:
    """The numbers of a record that say most, by the names people know them by."""
    shown = {}
    for key, name in NAMES.items():
        if key in record:
            value = record[key]
            shown[name] = f"{value:.4f}" if key in BARE else f"{value:.2f}" if key in PERCENT else percent(value)
    return shown


def percent(share: float) -> str:
    """A share in percent; COCO's −1, for which there was nothing to judge, as a dash."""
    return "–" if share < 0 else f"{100 * share:.2f}"
