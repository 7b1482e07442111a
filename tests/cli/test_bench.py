"""`linvit bench` on the CPU with tiny shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from linvit.measurement import model_speed, speed
from tests.cli.conftest import Outcome

SMALL = ["--batch", "1", "--heads", "2", "--head-dim", "8", "--budget", "0.005", "--device", "cpu"]


@pytest.fixture(autouse=True)
def quick_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("linvit.clock.copy_bandwidth", lambda device: 1e10)


def test_op_writes_a_result_and_prints_a_table(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    path, picture = tmp_path / "op.json", tmp_path / "op.png"
    asked = [*SMALL, "--tokens", "16,49", "--compared", "ours,sdpa", "-o", str(path), "--plot", str(picture)]
    outcome = linvit("bench", "op", "-m", "stella", *asked)
    assert outcome.code == 0, outcome.err
    assert "1, 2, 8, 49" in outcome.out and "forward+backward" in outcome.out and "×" in outcome.out
    assert "rows of ours were measured on the plain reference: the tensors are on cpu" in outcome.out
    result = json.loads(path.read_text())
    assert result["kind"] == "bench op" and result["complete"] and result["bandwidth"] == 1e10
    assert result["floor_elements"] == {"forward": 4, "forward+backward": 11}
    assert len(result["rows"]) == 2 * 2 * 2 and all(r["status"] == "ok" for r in result["rows"])
    assert [r["implementation"] for r in result["rows"] if "why_reference" in r] == ["ours"] * 4
    assert {"hardware", "torch", "triton", "commit", "source", "command", "time"} <= result["environment"].keys()
    assert picture.stat().st_size > 10_000
    again = linvit("bench", "op", "--from", str(path), "--json")
    assert again.json == result


def test_op_resumes(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    path = tmp_path / "op.json"
    asked = ["bench", "op", *SMALL, "--compared", "ours,sdpa", "--passes", "forward"]
    assert linvit(*asked, "--tokens", "16", "-o", str(path)).code == 0
    first = json.loads(path.read_text())["rows"]
    assert linvit(*asked, "--tokens", "16,20", "--resume", str(path)).code == 0
    second = json.loads(path.read_text())["rows"]
    assert second[:2] == first and [r["tokens"] for r in second] == [16, 16, 20, 20]
    refused = linvit(*asked, "--tokens", "16", "-o", str(path))
    assert refused.code == 2 and "not edited" in refused.err


def test_op_with_a_red_check(linvit: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_sdpa", lambda bias, q, k, v, x: speed._merge(v))
    outcome = linvit("bench", "op", *SMALL, "--tokens", "16", "--compared", "sdpa", "-o", str(tmp_path / "op.json"))
    assert outcome.code == 1
    assert "wrong" in outcome.out and "±" not in outcome.out


@pytest.mark.parametrize(
    "args, says",
    [
        (["--mechanism", "stela"], "did you mean stella"),
        (["--tokens", "many"], "whole numbers"),
        (["--tokens", "0"], "at least 1"),
        (["--precision", "fp31"], "unknown precision"),
        (["--preset", "huge"], "known: deit, grid, cpu, kernels"),
        (["--compared", "ours,theirs"], "unknown choice 'theirs'"),
        (["--device", "tpu"], "unknown device"),
        (["--from", "nowhere.json"], "cannot read"),
        (["--option", "eps"], "name=value"),
        (["--plot", "speed.gif"], "unknown picture format"),
    ],
)
def test_mistakes_are_one_line(
    linvit: Callable[..., Outcome], args: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = linvit("bench", "op", "--device", "cpu", *args)
    assert outcome.code == 2 and says in outcome.err and outcome.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_model(linvit: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(model, plan, **options):
        for block in model.blocks:
            block.attn.fused_attn = False
        return plan

    monkeypatch.setattr("linvit.conversion.convert", convert)
    path = tmp_path / "model.json"
    asked = ["test_vit", "--size", "32,64", "--batch", "2", "--runtime", "eager", "--budget", "0.01"]
    outcome = linvit("bench", "model", *asked, "--device", "cpu", "-o", str(path))
    assert outcome.code == 0, outcome.err
    result = json.loads(path.read_text())
    assert [model_speed.key(r)[:1] + model_speed.key(r)[2:] for r in result["rows"]] == [
        (res, which, "eager", attention)
        for res in (32, 64)
        for which in ("inference", "training")
        for attention in ("softmax", "converted")
    ]
    assert all(r["status"] == "ok" and r["images_per_second"] > 0 and r["error"] < 1e-3 for r in result["rows"])
    assert linvit("bench", "model", "vit_tny", "-o", str(tmp_path / "other.json")).code == 2


def test_a_wrong_model_costs_the_other_nothing(
    linvit: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(model, plan, **options):
        model.blocks[0].register_forward_hook(
            lambda module, args, out: out.abs() if out.dtype == torch.float32 else out
        )
        return plan

    monkeypatch.setattr("linvit.conversion.convert", convert)
    path = tmp_path / "model.json"
    asked = ["test_vit", "--size", "32", "--batch", "2", "--runtime", "eager", "--passes", "inference"]
    asked += ["--budget", "0.01", "--device", "cpu", "-o", str(path)]
    assert linvit("bench", "model", *asked).code == 1
    softmax, converted = json.loads(path.read_text())["rows"]
    assert softmax["status"] == "ok" and softmax["images_per_second"] > 0
    assert converted["status"] == "wrong" and "images_per_second" not in converted


def test_an_image_need_not_be_square(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    asked = ["bench", "model", "test_vit", "--plan=mixa", "--keep=1", "--size=32x64", "--batch=2", "--runtime=eager"]
    asked += ["--passes=inference", "--budget=0.01", "--device=cpu", "--json"]
    outcome = linvit(*asked, "-o", str(tmp_path / "model.json"))
    assert [(row["resolution"], row["status"]) for row in outcome.json["rows"]] == [("32x64", "ok")] * 2
    assert outcome.json["to"] == "mixa" and outcome.json["options"] == {"keep": 1}
    rows = linvit(*asked, "--resume", str(tmp_path / "model.json")).json["rows"]
    assert rows == outcome.json["rows"]


def test_compiled_training(linvit: Callable[..., Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.compile", partial(torch.compile, backend="eager"))
    asked = ["test_vit", "--size", "32", "--batch", "2", "--budget", "0.01", "--passes", "training"]
    asked += ["--runtime", "compiled", "--device", "cpu", "--json", "-o", str(tmp_path / "model.json")]
    outcome = linvit("bench", "model", *asked)
    assert [row["status"] for row in outcome.json["rows"]] == ["ok", "ok"], outcome.json


def test_a_cuda_graph_needs_a_cuda_device(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    asked = ["test_vit", "--size", "32", "--runtime", "graph", "--device", "cpu"]
    asked += ["-o", str(tmp_path / "model.json")]
    outcome = linvit("bench", "model", *asked)
    assert outcome.code == 2 and "needs a CUDA device" in outcome.err


def test_scaling(linvit: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = linvit("bench", "scaling", "-m", "stella", "--tokens", "1024", "--json")
    (found,) = outcome.json
    assert found["mechanism"] == "stella" and found["tokens"] == [1024, 2048]
    assert found["linear"] == (found["ratio"] < 2.6) and outcome.code == (0 if found["linear"] else 1)
    times = iter([1.0, 4.0] * 200)
    monkeypatch.setattr("linvit.measurement.scaling._once", lambda call: next(times))
    outcome = linvit("bench", "scaling", "-m", "stella", "--tokens", "64")
    assert outcome.code == 1 and "over 2.6" in outcome.out
    outcome = linvit("bench", "scaling", "-m", "softmax")
    assert outcome.code == 2 and "not a mechanism that is declared linear" in outcome.err


RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize(
    "file",
    [f for kind in ("op", "model", "training") for f in sorted(RESULTS.glob(f"{kind}-*.json"))],
    ids=lambda f: f.stem,
)
def test_committed_results_are_shown(linvit: Callable[..., Outcome], file: Path) -> None:
    kind = file.name.partition("-")[0]
    outcome = linvit("bench", kind, "--from", str(file))
    result = json.loads(file.read_text())
    assert outcome.code == 0 and result["environment"]["hardware"] in outcome.out
    assert len(outcome.out.splitlines()) > 3


def test_a_model_is_named_or_a_result_shown(linvit: Callable[..., Outcome]) -> None:
    outcome = linvit("bench", "model", "--from", str(RESULTS / "model-deit_small-stella-h200.json"))
    assert outcome.code == 0 and "deit_small_patch16_224 to stella in bf16 on NVIDIA H200" in outcome.out
    nameless = linvit("bench", "model")
    assert nameless.code == 2 and "give a timm model" in nameless.err


def test_what_a_conversion_gives_up_and_the_models_arguments(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    asked = ["swin_tiny_patch4_window7_224", "--plan", "stella", "--size", "32", "--batch", "1", "--runtime", "eager"]
    asked += ["--model-arg=embed_dim=12", "--model-arg=window_size=4", "--passes=inference", "--budget=0.01"]
    refused = linvit("bench", "model", *asked, "--device=cpu", "-o", str(tmp_path / "refused.json"))
    assert refused.code == 2 and "relative_bias" in refused.err and not list(tmp_path.iterdir())
    asked += ["--drop", "relative_bias,shift_mask", "--device=cpu", "--json", "-o", str(tmp_path / "model.json")]
    outcome = linvit("bench", "model", *asked)
    assert outcome.code == 0 and [row["status"] for row in outcome.json["rows"]] == ["ok", "ok"], outcome.err
    assert outcome.json["args"] == {"embed_dim": 12, "window_size": 4}
    assert outcome.json["options"] == {"drop": ["relative_bias", "shift_mask"]}


def test_auto_says_what_pays_and_goes_on(linvit: Callable[..., Outcome], tmp_path: Path) -> None:
    path = tmp_path / "auto.json"
    asked = ["bench", "auto", "--size", "32", "--budget", "0.005", "--device", "cpu", "--plan", "stella,relu_linear"]
    assert linvit(*asked, "resnet18", "-o", str(path)).code == 0
    outcome = linvit(*asked, "resnet18,test_vit", "--resume", str(path))
    assert outcome.code == 0, outcome.err
    none, vit = json.loads(path.read_text())["rows"]
    assert none["status"] == "refused" and "no attention" in outcome.out
    assert vit["model"] == "test_vit" and vit["resolution"] == 32 and vit["ratio"] >= 1
    assert sum(vit["plan"].values()) <= vit["layers"] and (vit["macs_converted"] == vit["macs"]) == (not vit["plan"])
    assert linvit("bench", "auto", "--from", str(path), "--json").json["kind"] == "bench auto"
    dropped = tmp_path / "dropped.json"
    told = linvit(*asked, "levit_128s", "--drop", "relative_bias", "-o", str(dropped))
    assert told.code == 0 and "what auto converts without relative_bias" in told.out, told.err
    wrong = linvit(*asked, "levit_128s", "--resume", str(dropped))
    assert wrong.code == 2 and "was measured with drop ['relative_bias'], not []" in wrong.err
    assert json.loads(dropped.read_text())["drop"] == ["relative_bias"]
    wrong = linvit(*asked, "vit_tinny", "-o", str(tmp_path / "wrong.json"))
    assert wrong.code == 2 and "unknown timm model" in wrong.err
    wrong = linvit(*asked, "test_vit", "--plan", "mixa", "-o", str(tmp_path / "wrong.json"))
    assert wrong.code == 2 and "mixa gives different layers different mechanisms" in wrong.err
    row = linvit(*asked, "swinv2_tiny_window8_256", "--size", "224", "--json", "-o", str(tmp_path / "size.json")).json
    assert "the model cannot take images of 224×224: shape" in row["rows"][0]["reason"]
