"""The demo from its first line to the report in the browser. Nothing heavy is imported before the bar is there."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path

from scripts.demo.screen import Screen

FOLDER = Path(__file__).parents[2] / "demo"
# One thread for each training and timing, and no GPU: the same demo everywhere. Before torch is imported.
SETTING = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
INTERRUPTED = 130  # the shell's code for Ctrl-C


def main() -> int:
    os.environ.update(SETTING)
    try:
        with Screen() as screen:
            code = demo(screen, FOLDER)
    except KeyboardInterrupt:
        print("\nstopped: `make demo` goes on from here", file=sys.stderr)
        return INTERRUPTED
    return code


def demo(screen: Screen, folder: Path, preset: str = "digits-distil") -> int:
    """All parts of it; 0 when nothing is missing."""
    screen.say("A teacher learns the built-in digits, models with linear attention learn from it, and a photograph is")
    screen.say("timed through three models. About three minutes on two cores.\n")
    screen.at("starting", 0.2, "loading PyTorch")
    from scripts.demo import comparing, photograph

    folder.mkdir(parents=True, exist_ok=True)
    page, picture = folder / "report.html", folder / "photograph.png"
    screen.say(f"$ export {' '.join(f'{name}={value}' for name, value in SETTING.items())}")
    complete = comparing.compare(preset, folder / "store", screen)
    contents = comparing.report(folder / "store", page, screen)
    rows = photograph.measure(screen)
    photograph.draw(rows, picture)
    photograph.record(rows, folder / "photograph.json")
    screen.stop()
    comparing.show(contents)
    photograph.show(rows)
    print(f"\nThe report:   {page}\nThe picture:  {picture}")
    if not complete:
        print("Some of the comparison failed: the report says what, and `make demo` tries it again.")
    elif desktop(os.environ):
        webbrowser.open(page.as_uri())
    return 0 if complete else 1


def desktop(environment: Mapping[str, str], platform: str = sys.platform) -> bool:
    """Whether somebody sits before this machine who would see a browser open."""
    if environment.get("CI") or environment.get("SSH_CONNECTION"):
        return False
    return platform == "darwin" or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


if __name__ == "__main__":
    sys.exit(main())
