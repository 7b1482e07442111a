"""The hub's files and API, faked here: names open models, and a pushed model comes back with its card."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub import constants

import linvit
from linvit import LinvitError
from linvit.conversion import open_model, open_original
from linvit.conversion.hub import pushing
from linvit.conversion.hub.fetching import repository
from linvit.conversion.report import Source
from linvit.tasks.kinds import kind_of
from tests.cli.training import folder_of
from tests.conversion.hugging import Case, transformers

CASE = Case("ViTForImageClassification", "ViTConfig", {"num_labels": 3})
PROCESSOR = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2, "size": {"height": 32, "width": 32}}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, switched off."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def put(cache: Path, name: str, folder: Path, revision: str = "main") -> None:
    """What the cache holds after a model was fetched."""
    place, commit = cache / f"models--{name.replace('/', '--')}", (revision.encode().hex() * 40)[:40]
    shutil.copytree(folder, place / "snapshots" / commit)
    (place / "refs").mkdir(exist_ok=True)
    (place / "refs" / revision).write_text(commit)


def theirs(folder: Path) -> Any:
    """A model that transformers saved, with its processor."""
    model = CASE.build()
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model


def converted() -> Any:
    model = timm.create_model("deit_tiny_patch16_224", img_size=32, patch_size=8, depth=2, embed_dim=24, num_heads=3)
    linvit.convert(model, "stella")
    return model.eval()


def test_which_names_are_the_hubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert str(repository("google/vit")) == "hf-hub:google/vit" == str(repository("hf_hub:google/vit"))
    assert repository("a/b@v1.0") == repository("a/b", "v1.0") and str(repository("a/b@v1.0")) == "hf-hub:a/b@v1.0"
    assert all(repository(name) is None for name in ("deit_tiny", "runs/best", "a/b/c", "/a/b", "./a"))
    assert repository("hf-hub:runs/best") is not None
    with pytest.raises(LinvitError, match="names no model of the hub: give hf-hub:user/name"):
        repository("hf-hub:deit")


@pytest.mark.parametrize("where", ["hub", "folder"])
def test_a_model_of_transformers_opens_by_its_name(cache: Path, tmp_path: Path, where: str) -> None:
    original = theirs(tmp_path / "vit")
    put(cache, "google/vit", tmp_path / "vit")
    name = "google/vit" if where == "hub" else str(tmp_path / "vit")
    model: Any = open_model(name)
    picture = CASE.image()
    with torch.no_grad():
        assert type(model) is type(original) and torch.equal(model(picture).logits, original(picture).logits)
        linvit.convert(model, "stella")
        linvit.save(model, tmp_path / "saved")
        again: Any = linvit.load(tmp_path / "saved")
        assert torch.equal(again(picture).logits, model(picture).logits)
        first: Any = open_original(again, "x")
        assert torch.equal(first(picture).logits, original(picture).logits)
    known = json.loads((tmp_path / "saved" / "config.json").read_text())["preprocessing"]
    assert (known["mean"], known["interpolation"], known["crop_pct"]) == ([0.5] * 3, "bilinear", 1.0)
    assert json.loads((tmp_path / "saved" / "preprocessor_config.json").read_text()) == PROCESSOR
    fresh: Any = open_model(name, pretrained=False, args={"num_classes": 5})
    assert fresh.config.num_labels == 5 and fresh(picture).logits.shape == (2, 5)
    other: Any = open_model(name, args={"num_labels": 5})
    assert torch.equal(other.vit.embeddings.cls_token, original.vit.embeddings.cls_token)


def test_another_image_size_has_its_positions_resampled(tmp_path: Path) -> None:
    """And nothing else that no longer fits begins anew unnoticed."""
    original: Any = CASE.build()
    original.save_pretrained(tmp_path)
    larger: Any = open_model(str(tmp_path), args={"image_size": 64, "num_labels": 5})
    images = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = larger.vit(images).last_hidden_state
        wanted = original.vit(images, interpolate_pos_encoding=True).last_hidden_state
    assert larger.config.num_labels == 5 and float((found - wanted).abs().max()) < 0.1 * float(wanted.std())
    with pytest.raises(
        LinvitError, match=r"fit what --model-arg asks for: vit\.\S+ is \(1, 1, 24\) and would be \(1, 1, 48\)"
    ):
        open_model(str(tmp_path), args={"hidden_size": 48})


def test_weights_that_a_folder_lacks_are_told_and_the_same_each_time(tmp_path: Path) -> None:
    """A ViT without the pooler, as DINO's, gets one: teacher and student must have the same."""
    case = Case("ViTModel", "ViTConfig")
    vit: Any = transformers.ViTModel(case.build().config, add_pooling_layer=False)
    vit.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"no weights for all of ViTModel: pooler.dense.bias, .* begin anew"):
        one, other = (open_model(str(tmp_path)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("where", ["hub", "folder"])
def test_a_model_of_transformers_is_trained_by_its_name(cache: Path, tmp_path: Path, where: str) -> None:
    """On the classes that it knows; for others it gets a classifier, which must learn before it can teach."""
    theirs(tmp_path / "vit")
    put(cache, "google/vit", tmp_path / "vit")
    name = "google/vit" if where == "hub" else str(tmp_path / "vit")
    quick: dict[str, Any] = {"settings": ["epochs=1", "batch_size=2", "precision=fp32"], "device": "cpu"}
    photos = folder_of(tmp_path / "photos", train={"a": 2, "b": 2, "c": 2}, val={"a": 1, "b": 1, "c": 1})
    trained = linvit.train(name, photos, plan="stella", **quick)
    assert trained.steps == 5 and len(linvit.evaluate(name, photos, device="cpu").labels) == 3
    others = folder_of(tmp_path / "others", train={"a": 2, "b": 2}, val={"a": 1, "b": 1})
    with pytest.raises(LinvitError, match="vit has not learnt these 2 classes and cannot teach them: train it first"):
        linvit.train(name, others, plan="stella", **quick)
    first = linvit.train(name, others, "finetune", output=tmp_path / "run", **quick)
    assert first.model is not None and first.model.config.num_labels == 2
    linvit.train(tmp_path / "run" / "best", others, plan="stella", **quick)
    transformers.ViTModel(CASE.build().config).save_pretrained(tmp_path / "bare")
    assert kind_of(str(tmp_path / "bare")).task == "features" and kind_of(name).task == "classify"


def test_a_converted_model_opens_with_transformers_own_classes(cache: Path, tmp_path: Path) -> None:
    model: Any = CASE.build()
    linvit.convert(model, "mixa", keep=1)
    linvit.save(model, tmp_path / "saved")
    put(cache, "user/vit", tmp_path / "saved")
    picture = CASE.image()
    with torch.no_grad():
        for name in (str(tmp_path / "saved"), "user/vit"):
            again = transformers.AutoModelForImageClassification.from_pretrained(name)
            assert type(again) is type(model) and torch.equal(again(picture).logits, model(picture).logits)
            bare = transformers.AutoModel.from_pretrained(name)
            assert torch.equal(bare(picture).last_hidden_state, model.vit(picture).last_hidden_state)
    with pytest.raises(LinvitError, match="holds a ViTForImageClassification, which AutoModelForObjectDetection"):
        transformers.AutoModelForObjectDetection.from_pretrained(tmp_path / "saved")
    half = transformers.AutoModel.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    assert next(half.parameters()).dtype == torch.bfloat16


def test_a_saved_model_loads_from_the_hub_at_a_revision(cache: Path, tmp_path: Path) -> None:
    models = {"main": converted(), "v2": converted()}
    for revision, model in models.items():
        linvit.save(model, tmp_path / revision)
        put(cache, "user/deit", tmp_path / revision, revision)
    picture = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(linvit.load("hf-hub:user/deit")(picture), models["main"](picture))
        assert torch.equal(linvit.load("hf-hub:user/deit", revision="v2")(picture), models["v2"](picture))
        assert torch.equal(open_model("user/deit@v2")(picture), models["v2"](picture))
    assert open_model("user/deit").linvit_source == Source("hf-hub:user/deit", {}, True)
    with pytest.raises(LinvitError, match="a folder has no revisions"):
        linvit.load(tmp_path / "main", revision="v2")


def test_what_cannot_be_opened_is_one_line(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(LinvitError, match="no folder google/vit, and the Hugging Face hub, which cannot be reached"):
        open_model("google/vit")
    theirs(tmp_path / "vit")
    torch.save({}, tmp_path / "vit" / "pytorch_model.bin")
    (tmp_path / "vit" / "model.safetensors").unlink()
    put(cache, "google/old", tmp_path / "vit")
    with pytest.raises(LinvitError, match=r"google/old has no model.safetensors: linvit does not read pickles"):
        open_model("google/old")
    with pytest.raises(LinvitError, match="cannot be read as transformers' ViTForImageClassification"):
        open_model(str(tmp_path / "vit"))
    (tmp_path / "vit" / "config.json").write_text('{"model_type": "vitt"}')
    with pytest.raises(LinvitError, match="knows no model of type 'vitt'"):
        open_model(str(tmp_path / "vit"))


REAL = huggingface_hub.HfApi


def accepted(call: str, *args: Any, **given: Any) -> None:
    """Whether the hub's own API takes such a call."""
    inspect.signature(getattr(REAL, call)).bind(None, *args, **given)


class Api:
    """The few calls of the hub's API that a push makes, into a folder."""

    calls: list[tuple[str, Any]] = []
    root: Path
    fails: Exception | None = None

    def __init__(self, token: str | None = None) -> None:
        self.calls.append(("token", token))

    def create_repo(self, repo: str, *, private: bool | None, exist_ok: bool) -> None:
        accepted("create_repo", repo, private=private, exist_ok=exist_ok)
        if self.fails is not None:
            raise self.fails
        self.calls.append((repo, private))

    def create_branch(self, repo: str, *, branch: str, exist_ok: bool) -> None:
        accepted("create_branch", repo, branch=branch, exist_ok=exist_ok)
        self.calls.append(("branch", branch))

    def upload_folder(self, *, repo_id: str, folder_path: Path, allow_patterns: list[str], **given: Any) -> Any:
        accepted("upload_folder", repo_id=repo_id, folder_path=folder_path, allow_patterns=allow_patterns, **given)
        self.calls.append(("message", given["commit_message"]))
        self.root.mkdir()
        for file in allow_patterns:
            if (Path(folder_path) / file).is_file():
                shutil.copy(Path(folder_path) / file, self.root / file)
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Api]:
    fake = type("FakeApi", (Api,), {"calls": [], "root": tmp_path / "sent"})
    monkeypatch.setattr(huggingface_hub, "HfApi", fake)
    monkeypatch.setattr(pushing, "reachable", lambda: True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return fake


def run_folder(root: Path) -> Path:
    """What a training leaves: a model, the run's record and its log, and a result of linvit bench beside."""
    linvit.save(converted(), root / "best")
    sets = [{"name": "flowers", "images": 1000}, {"name": "flowers", "images": 200}]
    config = {"recipe": "fast", "epochs": 2.0, "seed": 0, "distillation": "soft"}
    record = {"kind": "training", "config": config, "sets": sets, "teacher": "runs/original/best"}
    (root / "run.json").write_text(json.dumps(record))
    tops = [(0, 12.5), (10, 88.25), (20, 80.0)]
    (root / "log.jsonl").write_text(
        "".join(json.dumps({"kind": "eval", "step": step, "top1": top}) + "\n" for step, top in tops)
    )
    row = {"resolution": 896, "batch": 8, "pass": "inference", "mode": "eager", "status": "ok"}
    times = {"softmax": 3.0, "converted": 2.0}
    rows = [{**row, "attention": attention, "ms": {"median": time}} for attention, time in times.items()]
    bench = {"kind": "bench model", "model": "deit_tiny_patch16_224", "to": "stella", "rows": rows}
    (root / "speed.json").write_text(json.dumps({**bench, "environment": {"hardware": "a machine"}}))
    return root / "best"


def test_the_card_tells_the_run(tmp_path: Path) -> None:
    card = linvit.model_card(run_folder(tmp_path / "run"), "user/deit")
    found = huggingface_hub.ModelCard(card).data  # the hub's own reader
    assert (found.library_name, found.pipeline_tag, found.model_name) == ("linvit", "image-classification", "deit")
    (result,) = found.eval_results
    assert (result.dataset_name, result.metric_type, result.metric_value) == ("flowers", "accuracy", 88.25)
    for line in (
        'linvit.load("hf-hub:user/deit")',
        "| `stella` | 2 |",
        "- trained on flowers, 1,000 images",
        "- teacher: runs/original/best",
        "| top-1 accuracy, % | – | 12.50 | 88.25 |",
        "| stella | a machine | 896 | 8 | inference, eager | 1.50× |",
    ):
        assert line in card, line
    linvit.save(converted(), tmp_path / "bare")
    bare = linvit.model_card(tmp_path / "bare", "user/x")
    assert "## Training" not in bare and "## Speed" not in bare and "stella" in bare


def test_the_card_of_a_backbone_tells_its_features(tmp_path: Path) -> None:
    """The best model is that of the highest cosine, whatever its kNN."""
    folder = run_folder(tmp_path / "run")
    record = json.loads((folder.parent / "run.json").read_text())
    stages = [{"name": "align", "objective": "alignment"}, {"name": "final", "objective": "final"}]
    record["config"] |= {"distillation": "none", "stages": stages}
    (folder.parent / "run.json").write_text(json.dumps({**record, "teacher": ""}))
    values = [(0, 0.5, 40.0), (10, 0.98, 70.0), (20, 0.97, 71.0)]
    evals = [
        {"kind": "eval", "step": step, "cosine": cosine, "patch_cosine": cosine, "knn": knn, "teacher_knn": 72.5}
        for step, cosine, knn in values
    ]
    (folder.parent / "log.jsonl").write_text("".join(json.dumps(each) + "\n" for each in evals))
    card = linvit.model_card(folder, "user/deit")
    assert "| kNN accuracy, % | 72.50 | 40.00 | 70.00 |" in card and "after 10 steps" in card
    assert "| patch cosine with the original | – | 0.5000 | 0.9800 |" in card and "- teacher: the original" in card
    (result,) = huggingface_hub.ModelCard(card).data.eval_results
    assert (result.metric_type, result.metric_name, result.metric_value) == ("accuracy", "kNN accuracy, %", 70.0)


def test_a_pushed_model_comes_back(tmp_path: Path, api: type[Api]) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "secret.txt").write_text("mine")
    address = linvit.push_to_hub(folder, "user/deit", revision="v1", private=True)
    assert address == "https://hub/user/deit/commit/1"
    assert api.calls[:3] == [("token", None), ("user/deit", True), ("branch", "v1")]
    assert {file.name for file in api.root.iterdir()} == {"config.json", "model.safetensors", "README.md"}
    picture = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(linvit.load(api.root)(picture), linvit.load(folder)(picture))


def test_a_model_is_pushed_and_a_card_of_ones_own_stays(tmp_path: Path, api: type[Api]) -> None:
    linvit.push_to_hub(converted(), "hf-hub:user/deit")
    assert "| `stella` | 2 |" in (api.root / "README.md").read_text()
    shutil.rmtree(api.root)
    folder = run_folder(tmp_path / "run")
    (folder / "README.md").write_text("# Mine\n")
    linvit.push_to_hub(folder, "user/deit")
    assert (api.root / "README.md").read_text() == "# Mine\n"


def test_mistakes_of_a_push_are_one_line(tmp_path: Path, api: type[Api], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = run_folder(tmp_path / "run")
    for repo in ("deit", "a/b/c", "user/deit@v1"):
        with pytest.raises(LinvitError, match="give user/name"):
            linvit.push_to_hub(folder, repo)
    with pytest.raises(LinvitError, match=r"is a run: give one of its models, .*best"):
        linvit.push_to_hub(folder.parent, "user/deit")
    with pytest.raises(LinvitError, match="is no result file of linvit bench"):
        linvit.push_to_hub(folder, "user/deit", bench=[folder / "config.json"])
    with pytest.raises(LinvitError, match="there is no folder"):
        linvit.push_to_hub(tmp_path / "none", "user/deit")
    api.fails = ValueError("the hub is on fire")
    with pytest.raises(LinvitError, match="cannot push user/deit: the hub is on fire"):
        linvit.push_to_hub(folder, "user/deit")
    monkeypatch.setattr(pushing, "reachable", lambda: False)
    with pytest.raises(LinvitError, match="cannot be reached"):
        linvit.push_to_hub(folder, "user/deit")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(LinvitError, match="HF_HUB_OFFLINE"):
        linvit.push_to_hub(folder, "user/deit")
