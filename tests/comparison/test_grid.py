"""What a comparison expands to, and that keys are the same everywhere."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from linvit.attention import list_mechanisms
from linvit.codec import to_plain
from linvit.comparison.description.job import Job, describe_data, key_of
from linvit.comparison.description.request import from_result, survey
from linvit.comparison.description.spec import Comparison, Measure, Part
from linvit.errors import LinvitError
from tests.comparison.small import expand

SMALL = {"model": "fair", "width": 16, "depths": [1, 1], "heads": [1, 2]}
TINY = Comparison(
    plans=("softmax", "stella", "mixa:keep=1"),
    architecture=SMALL,
    settings=("epochs=1",),
    seeds=(0, 1),
    patch_size=(4,),
    size=(32,),
)


def kinds(jobs: list[Job]) -> dict[str, int]:
    return {kind: sum(job.kind == kind for job in jobs) for kind in ("teacher", "run", "speed")}


def test_candidates_times_seeds_and_one_speed_each() -> None:
    jobs = expand(TINY)
    assert kinds(jobs) == {"teacher": 0, "run": 6, "speed": 3}
    assert len({job.key for job in jobs}) == 9
    runs = [(job.label.candidate, job.label.seed) for job in jobs if job.kind == "run"]
    assert runs == [(name, seed) for name in ("softmax", "stella", "mixa:keep=1") for seed in (0, 1)]
    assert {t.candidate_key for t in jobs if t.kind == "run"} == {t.candidate_key for t in jobs if t.kind == "speed"}
    assert next(job for job in jobs if job.kind == "speed").identity.ladder == (32, 64, 128)


def test_further_parts_and_no_doubles() -> None:
    also = (Part(patch_size=(8,), seeds=(0,)), Part(seeds=(0, 1, 2)))
    jobs = expand(replace(TINY, also=also, measure=Measure(size=())))
    assert kinds(jobs) == {"teacher": 0, "run": 3 * 2 + 3 + 3, "speed": 0}
    assert {job.label.patch for job in jobs} == {4, 8}


def test_a_teacher_comes_first_and_once() -> None:
    comparison = replace(TINY, mode="distil", recipe="fast", settings=(), teacher_settings=("epochs=2",))
    jobs = expand(comparison)
    assert kinds(jobs) == {"teacher": 1, "run": 6, "speed": 3}
    teacher = jobs[0]
    assert teacher.identity.config["epochs"] == 2 and teacher.label.candidate == "softmax"
    assert all(job.needs == (teacher.key,) for job in jobs if job.kind == "run")
    other = expand(replace(comparison, teacher_settings=("epochs=3",)))
    assert not {job.key for job in other if job.kind == "run"} & {job.key for job in jobs}


def test_all_is_every_mechanism_that_fits() -> None:
    jobs, left_out = survey(replace(TINY, plans=("mixa:keep=1", "all"), seeds=(0,)))
    found = [job.label.candidate for job in jobs if job.kind == "run"]
    assert found[:2] == ["mixa:keep=1", "softmax"]
    assert set(found[1:]) | {row.candidate for row in left_out} == set(list_mechanisms())
    assert len(found) == len(set(found))


def test_all_says_what_it_leaves_out_and_why() -> None:
    small = {"model": "levit_128s", "embed_dim": [16, 32, 48], "key_dim": 8, "num_heads": [1, 2, 3], "depth": [1, 1, 1]}
    levit = replace(TINY, architecture=small, patch_size=(), size=(), plans=("all",))
    jobs, left_out = survey(levit)
    reasons = {row.candidate: row.reason for row in left_out}
    assert "subsampled queries" in reasons["mala"] and "wide values" in reasons["hydra"]
    assert "softmax" in {job.label.candidate for job in jobs}
    with pytest.raises(LinvitError, match="hydra does not fit levit_128s"):
        expand(replace(levit, plans=("hydra",)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plans": ("mixa:keep=9",)}, "cannot keep 9 layers: the model has 2"),
        ({"plans": ("stela",)}, "did you mean stella"),
        ({"settings": ("epoch=1",)}, "did you mean epochs"),
        ({"recipe": "diet"}, "did you mean deit"),
        ({"recipe": "fast"}, "learns from a teacher"),
        ({"mode": "distil", "recipe": "deit"}, "does not distil"),
        ({"mode": "distil", "recipe": "fast", "teacher_recipe": "mixa"}, "learns from a teacher itself"),
        ({"architecture": {"model": "deit_tiny_patch_224"}}, "did you mean deit_"),
        ({"architecture": {"model": "deit_tiny_patch16_224", "depht": 3}}, "cannot be built"),
        ({"architecture": {"model": "resnet18"}, "plans": ("all",)}, "no attention"),
        ({"data": "nowhere"}, "no data at nowhere"),
    ],
)
def test_mistakes_are_found_before_anything_runs(change: dict[str, Any], message: str) -> None:
    with pytest.raises(LinvitError) as caught:
        expand(replace(TINY, **{"patch_size": (), "size": (), **change} if "architecture" in change else change))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_keys_are_the_same_in_another_process() -> None:
    code = (
        "from tests.comparison.test_grid import TINY; from tests.comparison.small import expand;"
        "print(*(job.key for job in expand(TINY)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        cwd=Path(__file__).parents[2],
    )
    assert done.stdout.split() == [job.key for job in expand(TINY)]


def test_keys_are_frozen() -> None:
    """A change here makes every finished run be done again: only on purpose."""
    assert key_of({"seed": 1, "config": {"epochs": 20.0}, "b": [1, 2.5, None, "é"]}) == "016d5052a81e04f8"


def test_what_counts_for_a_key_and_what_not() -> None:
    first = expand(TINY)[0].key
    assert expand(replace(TINY, settings=("epochs=1.0",)))[0].key == first
    assert expand(replace(TINY, settings=("epochs=1", "checkpoint_seconds=5")))[0].key == first
    assert expand(replace(TINY, settings=("epochs=1", "lr=1e-3")))[0].key != first
    assert expand(replace(TINY, measure=Measure(batch=3)))[0].key == first
    assert expand(replace(TINY, architecture={**SMALL, "mlp_ratio": 4}))[0].key == first
    assert expand(replace(TINY, architecture={**SMALL, "mlp_ratio": 2}))[0].key != first


def folder_of_images(root: Path, colour: int = 0) -> Path:
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for i in range(2):
                Image.fromarray(np.full((4, 4, 3), colour + i, np.uint8)).save(root / split / name / f"{i}.png")
    return root


def test_digests_of_data(tmp_path: Path) -> None:
    """A set's digest tells sets apart, and does not depend on where they lie."""
    first, second = (describe_data(str(folder_of_images(tmp_path / place / "photos"))) for place in "ab")
    assert first == second == replace(first, name="photos", classes=2, train=4, validation=4)
    (tmp_path / "b" / "photos" / "train" / "cat" / "0.png").rename(
        tmp_path / "b" / "photos" / "train" / "cat" / "x.png"
    )
    assert describe_data(str(tmp_path / "b" / "photos")).digest != first.digest
    digits = describe_data("digits")
    assert digits.name == "digits" and digits.train + digits.validation == 1797
    assert describe_data("photos", str(tmp_path / "a")).digest == first.digest


def test_a_teacher_brings_its_architecture(tmp_path: Path) -> None:
    import timm

    import linvit

    settings = {"embed_dim": 16, "depths": (1, 1), "num_heads": (1, 2), "num_classes": 10, "img_size": 32}
    model = timm.create_model("fair_pyramid_p4_sa", **settings)
    linvit.save(model, tmp_path / "teacher", model_args=settings)
    comparison = Comparison(mode="distil", teacher=str(tmp_path / "teacher"), plans=("softmax", "stella"))
    jobs = expand(comparison)
    assert kinds(jobs)["teacher"] == 0
    run = jobs[0]
    assert run.identity.architecture["model"] == "fair_pyramid_p4_sa" and run.identity.classes == 10
    assert run.places["teacher"] == str(tmp_path / "teacher") and str(tmp_path) not in str(run.identity.teacher)
    (tmp_path / "teacher").rename(tmp_path / "moved")
    moved = expand(replace(comparison, teacher=str(tmp_path / "moved")))
    assert [job.key for job in moved] == [job.key for job in jobs]
    linvit.convert(model, "stella")
    linvit.save(model, tmp_path / "converted", model_args=settings)
    with pytest.raises(LinvitError, match="is converted already"):
        expand(replace(comparison, teacher=str(tmp_path / "converted")))


def test_a_result_file_is_a_description() -> None:
    jobs = expand(replace(TINY, mode="distil", recipe="fast", settings=()))
    teacher, run = jobs[0], jobs[1]
    again = from_result({"identity": to_plain(run.identity), "label": to_plain(run.label)}, run.places)
    assert again == [teacher, run]
    assert run.command == f"linvit compare {run.key}.json -o again"
    moved = replace(run, places={"data": "my photos", "root": "/data"})
    assert moved.command == f"linvit compare {run.key}.json -o again --data 'my photos' --root /data"
    with pytest.raises(LinvitError, match="no result file"):
        from_result({"identity": {}}, {})
