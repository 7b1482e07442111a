"""Files that are whole or not there."""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from linvit.errors import LinvitError, Unwritable
from linvit.files import (
    TEMPORARY,
    clear_temporary,
    create,
    locked,
    move_in,
    read_json,
    sha256,
    temporary,
    temporary_folder,
    write,
    write_folder,
    write_json,
)
from tests.full_disk import small_files

fork = multiprocessing.get_context("fork")


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.txt"
    write(path, "one")
    write(path, b"two")
    assert path.read_bytes() == b"two"
    with pytest.raises(RuntimeError), temporary(path) as beside:
        beside.write_text("half")
        raise RuntimeError
    assert path.read_bytes() == b"two" and [entry.name for entry in path.parent.iterdir()] == ["a.txt"]
    mask = os.umask(0)
    os.umask(mask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_the_last_file_goes_first_and_comes_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, source = tmp_path / "folder", tmp_path / "new"
    for place, names in ((folder, ("a", "b.json", "c")), (source, ("a", "b.json", "d"))):
        (place / "inside").mkdir(parents=True)
        for name in names:
            (place / name).write_text(place.name)
    (folder / "inside" / "old").touch()
    order: list[str] = []
    replace = os.replace

    def watched(path: Path, there: Path) -> None:
        assert not (folder / "b.json").exists()
        order.append(path.name)
        replace(path, there)

    monkeypatch.setattr(os, "replace", watched)
    move_in(source, folder, "b.json")
    assert sorted(order) == ["a", "b.json", "d", "inside"] and order[-1] == "b.json"
    found = {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}
    assert found == {"a": "new", "b.json": "new", "c": "folder", "d": "new"} and not any((folder / "inside").iterdir())


def test_of_two_writers_the_first_ones_stays(tmp_path: Path) -> None:
    assert create(tmp_path / "a", "one") and not create(tmp_path / "a", "two")
    assert (tmp_path / "a").read_text() == "one" and len(list(tmp_path.iterdir())) == 1


def race(folder: str, barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put(create(Path(folder, "a"), str(os.getpid())))


def test_of_many_writers_one_wins(tmp_path: Path) -> None:
    barrier, results = fork.Barrier(6), fork.Queue()
    workers = [fork.Process(target=race, args=(str(tmp_path), barrier, results)) for _ in range(6)]
    for worker in workers:
        worker.start()
    assert sorted(results.get(timeout=20) for _ in workers) == [False] * 5 + [True]
    for worker in workers:
        worker.join()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]


def test_a_disk_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert create(tmp_path / "a.json", b"{}") and (tmp_path / "a.json").read_bytes() == b"{}"
    assert not create(tmp_path / "a.json", b"[]") and (tmp_path / "a.json").read_bytes() == b"{}"


def test_another_error_of_a_link_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(Unwritable, match=r"cannot write .*a: No space left"):
        create(tmp_path / "a", "x")
    assert not list(tmp_path.iterdir())


def test_json(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"é": [1, 2.5]})
    assert read_json(tmp_path / "a.json") == {"é": [1, 2.5]} and "é" in (tmp_path / "a.json").read_text()
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", math.nan)
    assert read_json(tmp_path / "a.json") == {"é": [1, 2.5]}, "what was there stays"
    (tmp_path / "half.json").write_text('{"a": ')
    assert read_json(tmp_path / "half.json") is None and read_json(tmp_path / "none.json") is None


def writing(text: str) -> Callable[[str], object]:
    return lambda path: Path(path).write_text(text)


def test_a_folder_is_written_whole(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_folder(folder, {"weights": writing("1"), "config.json": writing("{}")})
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"weights": "1", "config.json": "{}"}

    def fails(path: str) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(LinvitError, match="cannot write"):
        write_folder(folder, {"weights": writing("2"), "config.json": fails})
    assert {path.name: path.read_text() for path in folder.iterdir()} == {"weights": "1", "config.json": "{}"}
    with pytest.raises(LinvitError, match="cannot write"):
        write_folder(tmp_path / "new", {"weights": fails})
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(LinvitError, match="is a file"):
        write_folder(tmp_path / "file", {"weights": writing("1")})


def test_a_disk_that_takes_no_more_is_one_line(tmp_path: Path) -> None:
    with small_files(100):
        for write_it in (
            lambda: write(tmp_path / "a", b"x" * 5000),
            lambda: create(tmp_path / "a", b"x" * 5000),
            lambda: write_folder(tmp_path / "b", {"weights": writing("x" * 5000)}),
        ):
            with pytest.raises(Unwritable, match=r"cannot write .*: .*File too large"):
                write_it()
    assert not list(tmp_path.iterdir())


def half_write(folder: str, pipe: Any) -> None:
    with temporary(Path(folder, "a")) as beside, temporary_folder(Path(folder)) as other:
        beside.write_text("half")
        (other / "b").write_text("half")
        pipe.send("written")
        time.sleep(60)


def test_what_a_killed_process_left_is_cleared(tmp_path: Path) -> None:
    """But not what a living one is writing, nor what another machine may be."""
    (tmp_path / f"{TEMPORARY}abc").touch()
    (tmp_path / "kept").touch()
    away = tmp_path / f"{TEMPORARY}1-00000000-x"
    away.touch()
    ours, theirs = fork.Pipe()
    other = fork.Process(target=half_write, args=(str(tmp_path), theirs))
    other.start()
    assert ours.recv() == "written"
    clear_temporary(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    other.kill()
    other.join()
    clear_temporary(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"kept", away.name}
    os.utime(away, (1e9, 1e9))
    clear_temporary(tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"kept"}


def hold(path: str, pipe: Any) -> None:
    with locked(Path(path)):
        pipe.send("held")
        time.sleep(60)


@pytest.mark.parametrize("name", ["lock", "."])
def test_a_lock_is_one_process_at_a_time(tmp_path: Path, name: str) -> None:
    """Of a file, or of a folder itself; and it goes with its process."""
    ours, theirs = fork.Pipe()
    other = fork.Process(target=hold, args=(str(tmp_path / name), theirs))
    other.start()
    assert ours.recv() == "held"
    with (
        pytest.raises(LinvitError, match="somebody is at it"),
        locked(tmp_path / name, wait=0.2, busy="somebody is at it"),
    ):
        pass
    other.kill()
    other.join()
    with locked(tmp_path / name, wait=10, busy="still held"):
        pass
    with locked(tmp_path / name, wait=0, busy="not given back"):
        pass


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert sha256(tmp_path / "a").hex().startswith("ba7816bf8f01cfea")
