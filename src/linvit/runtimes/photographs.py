"""Real pictures to verify an export on: a folder's, or photographs that packages on every machine with linvit hold."""

from pathlib import Path

import numpy as np

from linvit.errors import LinvitError
from linvit.images import eight_bits, images_below, naming, open_image, upright


def photographs(count: int, folder: Path | None = None) -> list[np.ndarray]:
    """So many pictures `(height, width, 3)` in bytes: taken evenly from all files below a folder, or views of ours."""
    found = ours(count) if folder is None else read(folder, count)
    return found[:count]


def ours(count: int) -> list[np.ndarray]:
    """scikit-learn's two photographs and matplotlib's, whole and then in ever smaller parts, each part another view."""
    from matplotlib import get_data_path
    from sklearn.datasets import load_sample_images

    portrait = open_file(Path(get_data_path(), "sample_data", "grace_hopper.jpg"))
    whole = [*load_sample_images().images, portrait]
    views = list(whole)
    parts = 2
    while len(views) < count:
        for picture in whole:
            height, width = picture.shape[0] // parts, picture.shape[1] // parts
            for row in range(parts):
                for column in range(parts):
                    views.append(picture[row * height : (row + 1) * height, column * width : (column + 1) * width])
        parts += 1
    return [np.ascontiguousarray(view) for view in views]


def read(folder: Path, count: int) -> list[np.ndarray]:
    if not folder.is_dir():
        raise LinvitError(f"{folder} is no folder of images")
    files = sorted(images_below(folder))
    if not files:
        raise LinvitError(f"no images in {folder}")
    count = min(count, len(files))
    return [open_file(Path(files[place * len(files) // count])) for place in range(count)]


def open_file(path: Path) -> np.ndarray:
    with naming(str(path), "replace it or take it out"), open(path, "rb") as file:
        return np.asarray(eight_bits(upright(open_image(file))).convert("RGB"))
