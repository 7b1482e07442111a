"""What a run writes while it goes: one JSON object a line, always, and TensorBoard's files where it is installed."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from linvit.errors import LinvitError
from linvit.files import write, writing

LOG = "log.jsonl"
Watch = Callable[[dict[str, Any]], None]


class Log:
    """Records of a run: kind `train`, `eval` or `note`, with their step. `watch` hears each, for a screen, and between
    them, a few times a second, records of kind `step`, which are not kept. What a run logged after the step it resumes
    from is dropped, and so is a line that a crash left half written."""

    def __init__(self, folder: Path | None, watch: Watch | None = None, after: int = -1) -> None:
        self.watch, self.file, self.board = watch, None, None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if (folder / LOG).exists():
                kept = [record for record in read_log(folder) if record["step"] <= after]
                write(folder / LOG, "".join(json.dumps(record) + "\n" for record in kept))
            self.file = open(folder / LOG, "a", encoding="utf-8")  # noqa: SIM115
            self.board = tensorboard(folder, after)

    def add(self, kind: str, step: int, values: Mapping[str, Any], shown: bool = True) -> None:
        record = {"kind": kind, "step": step, **values}
        if self.file is not None:
            # NaN and infinity, a gradient's norm in half precision say, are null in JSON
            text = json.dumps(json.loads(json.dumps(record), parse_constant=lambda name: None))
            with writing(self.file.name):
                self.file.write(f"{text}\n")
                self.file.flush()
        if self.board is not None:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self.board.add_scalar(f"{kind}/{name}", value, step)
        if self.watch is not None and shown:
            self.watch(record)

    def close(self) -> None:
        for writer in (self.file, self.board):
            if writer is not None:
                writer.close()


def tensorboard(folder: Path, after: int) -> Any:
    """TensorBoard's writer, which drops what was drawn after a step; None where the package is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(folder / "tensorboard", purge_step=after + 1)


def read_log(folder: Path) -> list[dict[str, Any]]:
    """All records of a run, without lines that are none."""
    path = folder / LOG
    if not path.is_file():
        raise LinvitError(f"{folder} holds no {LOG}: give the folder of a training run")
    found = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            found.append(record)
    return found
