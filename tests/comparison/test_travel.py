"""A store packed into an archive, and merged with others."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linvit.comparison.spec import load
from linvit.comparison.store import Store
from linvit.errors import LinvitError
from tests.comparison.tasks import make_result, make_task


def contents(folder: Path) -> dict[str, bytes]:
    """All that counts of a store, by name."""
    names = ("runs", "speeds", "failures", "repeats", "comparisons", "teachers", "work")
    files = (path for name in names for path in (folder / name).rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.is_file()}


def test_pack_and_merge(tmp_path: Path) -> None:
    store, teacher, run, half = Store(tmp_path / "here"), make_task(1, "teacher"), make_task(2), make_task(3)
    for task in (teacher, run):
        store.write(task, make_result(task))
    store.fail(half, "no luck")
    store.ask(load("digits"))
    for folder in (store.teacher_folder(teacher.key), store.teacher_folder(half.key), store.work_folder(half.key)):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"x" * 100)
    store.pack(tmp_path / "out" / "store.tar")
    store.pack(tmp_path / "whole.tar.gz", work=True)
    light, whole = Store(tmp_path / "light"), Store(tmp_path / "whole")
    added = light.merge(tmp_path / "out" / "store.tar")
    assert added == {
        **{"runs": 2, "speeds": 0, "failures": 1, "comparisons": 1, "repeats": 0},
        **{"teachers": 1, "work": 0},
    }
    assert not light.notes and light.finished(run) and light.comparisons() == store.comparisons()
    assert light.teacher_folder(teacher.key).exists() and not light.teacher_folder(half.key).exists()
    assert whole.merge(tmp_path / "whole.tar.gz")["work"] == 1
    assert (whole.work_folder(half.key) / "model.safetensors").read_bytes() == b"x" * 100
    assert not any(whole.merge(tmp_path / "here").values()), "nothing is new"
    assert not list((tmp_path / "light").glob(".merging*"))


def test_work_under_way_here_is_not_touched(tmp_path: Path) -> None:
    task = make_task(1)
    here, there = Store(tmp_path / "here"), Store(tmp_path / "there")
    (there.work_folder(task.key)).mkdir(parents=True)
    there.fail(make_task(9), "so that it is a store")
    with here.claim(task) or pytest.fail("no claim"):
        assert here.merge(tmp_path / "there")["work"] == 0
    assert here.merge(tmp_path / "there", work=False)["work"] == 0
    assert here.merge(tmp_path / "there")["work"] == 1


def test_a_cut_archive_gives_what_it_has(tmp_path: Path) -> None:
    store = Store(tmp_path / "here")
    for number in range(30):
        store.write(make_task(number), make_result(make_task(number)))
    store.pack(tmp_path / "store.tar")
    content = (tmp_path / "store.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(content[: len(content) // 2])
    other = Store(tmp_path / "there")
    added = other.merge(tmp_path / "cut.tar")
    assert 5 < added["runs"] < 30 and "cannot be read to its end" in other.notes[0]
    assert len(other.results("run")) == added["runs"]


def test_what_is_no_store(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("hello")
    store = Store(tmp_path / "here")
    for path, message in (("nowhere", "no store at"), ("empty", "holds no store"), ("text", "holds no store")):
        with pytest.raises(LinvitError, match=message):
            store.merge(tmp_path / path)


def test_an_archive_cannot_write_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    with tarfile.open(tmp_path / "bad.tar", "w") as archive:
        archive.add(tmp_path / "x", "../../escaped")
    with pytest.raises(LinvitError):
        Store(tmp_path / "a" / "b").merge(tmp_path / "bad.tar")
    assert not list(tmp_path.rglob("escaped"))


versions = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=8)


def fill(folder: Path, made: list[tuple[int, int]]) -> Store:
    """A store with results of some keys, each in some version; later versions of a key are merged in."""
    store = Store(folder)
    (folder / "runs").mkdir(parents=True, exist_ok=True)
    for i, (number, version) in enumerate(made):
        task = make_task(number)
        other = Store(folder.with_name(f"{folder.name}-{i}"))
        other.write(task, make_result(task, time=f"2026-01-0{version + 1}", version=version))
        store.merge(other.folder)
    return store


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(a=versions, b=versions)
def test_merging_loses_nothing_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, a: list[tuple[int, int]], b: list[tuple[int, int]]
) -> None:
    tmp = tmp_path_factory.mktemp("merge")
    first, second = fill(tmp / "a", a), fill(tmp / "b", b)
    one, two = Store(tmp / "one"), Store(tmp / "two")
    for store, order in ((one, (first, second)), (two, (second, first))):
        for other in order:
            store.merge(other.folder)
    assert contents(one.folder) == contents(two.folder)
    before = contents(one.folder)
    assert not any(one.merge(second.folder).values()) and not any(one.merge(two.folder).values())
    assert contents(one.folder) == before
    kept = [json.loads(content) for content in before.values()]
    assert {(r["key"], r["version"]) for r in kept} == {(make_task(n).key, v) for n, v in {*a, *b}}
    assert len(kept) == len({*a, *b}), "nothing doubled"
    for result in one.results("run"):
        assert result["version"] == min(v for n, v in {*a, *b} if make_task(n).key == result["key"])
