"""Write the photographs of the gallery, which ship with scikit-image, into a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image
from skimage import data

NAMES = ("astronaut", "chelsea", "coffee", "rocket")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in NAMES:
        Image.fromarray(getattr(data, name)()).save(folder / f"{name}.png")


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    asked.add_argument("folder", type=Path, nargs="?", default=Path("photos"))
    main(asked.parse_args().folder)
