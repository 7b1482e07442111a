"""What the page's addresses answer: numbers that are the models' own, and refusals."""

from __future__ import annotations

import json
import struct
import threading
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

from linvit.errors import LinvitError
from linvit.page import Page
from linvit.page.app import Cancelled, listen
from linvit.page.cache import Cache
from linvit.page.catalogue import Catalogue
from linvit.page.sides import Wish, timed


def found(answer: Any) -> dict[str, Any]:
    """What a stream ends with."""
    assert answer.status_code == 200, answer.text
    last = json.loads(answer.text.splitlines()[-1])
    assert "found" in last, last
    return last["found"]


def look(client: TestClient, folder: Path, plan: str = "as it is", picture: str = "flower") -> dict[str, Any]:
    return found(client.post("/api/look", json={"picture": picture, "model": str(folder), "plan": plan, "size": 64}))


def png(width: int, height: int, rows: bytes | None = None) -> bytes:
    """A PNG whose header says this size, whatever follows."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(height * (3 * width + 1))) if rows is None else rows
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


@pytest.mark.parametrize("plan", ["as it is", "stella", "xca"])
@pytest.mark.parametrize("head", ["mean", "2"])
def test_a_row_is_the_cores(client: TestClient, page: Page, folder: Path, plan: str, head: str) -> None:
    seen = look(client, folder, plan)
    layer = page.looks.find(seen["look"]).seen.layer(1)
    asked = {"look": seen["look"], "layer": 1, "query": "0.6,0.3", "head": head}
    body = client.get("/api/row", params=asked).content
    assert struct.unpack("<3i", body[:12]) == (1, 4, 4)
    rows = layer.row(1 + 1 * 4 + 2)
    expected = rows.mean(0) if head == "mean" else rows[int(head)]
    assert np.frombuffer(body[12:], "<f4") == pytest.approx(expected.numpy(), abs=1e-7)


def test_what_it_says_is_what_predict_says(client: TestClient, folder: Path) -> None:
    from linvit.page.pictures import samples
    from linvit.tasks.predicting import predict

    (expected,) = predict(str(folder / "best"), samples()["flower"], device="cpu")
    said = {one["class"]: one["probability"] for one in look(client, folder)["answer"]["classes"]}
    assert said == pytest.approx(dict(expected.classes), abs=1e-5)


def test_rollout_class_token_and_all(client: TestClient, page: Page, folder: Path) -> None:
    seen = look(client, folder)
    kept = page.looks.find(seen["look"]).seen
    layer = kept.layer(1)
    expected = {
        ("rollout", "class"): kept.rollout(layer, layer.one(0)),
        ("attention", "all"): layer.pooled().mean(0),
    }
    for (show, query), values in expected.items():
        body = client.get("/api/row", params={"look": seen["look"], "layer": 1, "show": show, "query": query}).content
        assert np.frombuffer(body[12:], "<f4") == pytest.approx(values.numpy(), abs=1e-6)


def test_similarity_is_one_with_itself(client: TestClient, folder: Path) -> None:
    asked = {"look": look(client, folder)["look"], "layer": 0, "show": "similarity", "query": "0.9,0.9"}
    body = client.get("/api/row", params=asked).content
    values = np.frombuffer(body[12:], "<f4")
    assert struct.unpack("<3i", body[:12]) == (0, 4, 4) and values.argmax() == 15 and values[15] == pytest.approx(1)


def test_colours_have_one_basis(client: TestClient, page: Page, folder: Path) -> None:
    """Against an SVD of the left side's features."""
    import base64

    keys = [look(client, folder, plan)["look"] for plan in ("as it is", "stella")]
    told = client.get("/api/features", params={"looks": ",".join(keys), "layers": "1,1"}).json()
    features = [page.looks.find(key).seen.layer(1).patch_features().double() for key in keys]
    mean = features[0].mean(0)
    vectors = torch.linalg.svd(features[0] - mean)[2][:3].T
    vectors = vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
    low, high = ((features[0] - mean) @ vectors).quantile(torch.tensor([0.01, 0.99]).double(), dim=0)
    assert told["shared"]
    for picture, own in zip(told["pictures"], features, strict=True):
        expected = 255 * (((own - mean) @ vectors - low) / (high - low)).clamp(0, 1)
        drawn = np.frombuffer(base64.b64decode(picture["rgb"]), np.uint8).reshape(-1, 3)
        assert np.abs(drawn - expected.numpy()).max() < 2


def test_latency_tells_how_far_it_is(client: TestClient, folder: Path) -> None:
    sides = [{"model": str(folder), "plan": plan} for plan in ("as it is", "stella")]
    answer = client.post("/api/latency", json={"size": 64, "sides": sides})
    parts = [event["part"] for event in map(json.loads, answer.text.splitlines()) if "part" in event]
    assert parts == sorted(parts) and parts[0] == 0 and 0 < parts[-1] <= 1
    assert all(0 < side["low"] <= side["median"] <= side["high"] for side in found(answer)["sides"])


def test_a_cancelled_measurement_ends_at_its_next_pass(page: Page, folder: Path) -> None:
    told: list[Any] = []

    def tell(event: Any) -> None:
        told.append(event)
        if event.get("part"):
            raise Cancelled

    sides = [page.sides.get(Wish(str(folder), plan, 64), lambda _: None) for plan in ("as it is", "stella")]
    with pytest.raises(Cancelled):
        timed(sides, tell)
    assert len(told) < 10 and not page.sides.measuring.locked()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"just some words, renamed to photo.jpg", "none of JPEG"),
        (png(1, 1), "at least 8"),
        (png(20_000, 10, b""), "at most 12,000"),
        (png(11_000, 11_000, b""), "50 million"),
        (png(60_000, 60_000, b""), "pixel"),
        (png(64, 64, b"\x00\x01\x02"), "cannot read"),
        (png(64, 64)[:-40], "cannot read"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "none of JPEG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "none of JPEG"),
    ],
    ids=["empty", "text", "1×1", "20,000", "pixels", "bomb", "corrupt", "cut", "postscript", "svg"],
)
def test_hostile_files_are_refused_in_a_line(client: TestClient, page: Page, data: bytes, says: str) -> None:
    before = len(page.pictures.slots)
    answer = client.post("/api/pictures", content=data)
    assert answer.status_code == 422 and says in answer.json()["error"] and "\n" not in answer.json()["error"]
    assert len(page.pictures.slots) == before


@pytest.mark.parametrize("chunked", [False, True])
def test_too_large_a_file_is_not_read(client: TestClient, chunked: bool) -> None:
    data = bytes(21 * 2**20)
    parts = (data[start : start + 2**20] for start in range(0, len(data), 2**20))
    answer = client.post("/api/pictures", content=parts if chunked else data)
    assert answer.status_code == 413 and "20 MiB" in answer.json()["error"]


def test_a_picture_is_turned_and_made_smaller(client: TestClient, page: Page) -> None:
    picture, file = Image.new("RGB", (3000, 1500), "red"), BytesIO()
    exif = picture.getexif()
    exif[0x0112] = 6
    picture.save(file, "JPEG", exif=exif)
    told = client.post("/api/pictures", content=file.getvalue()).json()
    assert (told["height"], told["width"]) == (1536, 768) and len(told["picture"]) > 20


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"host": "evil.example"},
        {"host": "evil.example:8765"},
        {"host": "192.168.1.9:8765"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
    ids=str,
)
def test_other_origins_are_refused(client: TestClient, headers: dict[str, str]) -> None:
    for answer in (client.get("/api/choices", headers=headers), client.post("/api/pictures", headers=headers)):
        assert answer.status_code == 403 and answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_its_own_page_and_a_link_to_it_are_answered(client: TestClient) -> None:
    own = {"origin": "http://localhost:8765", "host": "localhost:8765", "sec-fetch-site": "same-origin"}
    assert client.get("/api/choices", headers=own).status_code == 200
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    answer = client.get("/", headers=link)
    assert answer.status_code == 200 and "default-src 'none'" in answer.headers["content-security-policy"]
    assert client.get("/api/choices", headers=link).status_code == 403


@pytest.mark.parametrize(
    "asked",
    [
        {"model": "/etc"},
        {"model": "../best"},
        {"model": "hf-hub:timm/vit_tiny"},
        {"model": "local-dir:/tmp"},
        {"model": "vit_tiny_patch16_224.nobody"},
        {"model": "faster_rcnn"},
        {"plan": "/etc/passwd.json"},
        {"plan": "auto"},
        {"plan": "mixa:keep=99"},
        {"size": 99_999},
        {"size": 65},
        {"picture": "../../etc/passwd"},
    ],
    ids=str,
)
def test_nothing_else_can_be_opened(client: TestClient, folder: Path, asked: dict[str, Any]) -> None:
    usual = {"picture": "flower", "model": str(folder), "plan": "as it is", "size": 64}
    answer = client.post("/api/look", json=usual | asked)
    told = json.loads(answer.text.splitlines()[-1])
    assert "error" in told and "made a mistake" not in told["error"], told
    assert "root:" not in answer.text


def test_files_outside_the_pages_are_not_served(client: TestClient) -> None:
    for path in ("/js/..%2f..%2fapp.py", "/js/%2e%2e/app.js", "/js/nothing.js", "/page_files/page.html"):
        assert client.get(path).status_code == 404, path


def test_wrong_questions_are_refusals(client: TestClient, folder: Path) -> None:
    key = look(client, folder)["look"]
    for asked in ("layer=7", "layer=x", "head=3", "head=-1", "query=2,2", "query=nan,nan", "query=a", "show=all"):
        answer = client.get(f"/api/row?look={key}&layer=0&{asked}")
        assert answer.status_code == 422 and answer.json()["error"], asked
    assert client.get("/api/row?look=unknown").status_code == 404
    for body in (b"[]", b"{", b"\xff\xfe"):
        assert client.post("/api/look", content=body).status_code == 422


def test_two_visitors_do_not_disturb_each_other(client: TestClient, page: Page, folder: Path) -> None:
    """Each has the rows of the own picture, though both ask the same model at once."""
    rows: dict[str, set[bytes]] = {"flower": set(), "temple": set()}
    keys: list[str] = []

    def visit(picture: str) -> None:
        for _ in range(4):
            key = look(client, folder, "stella", picture)["look"]
            keys.append(key)
            rows[picture].add(client.get(f"/api/row?look={key}&layer=1&query=0.1,0.1").content)

    visitors = [threading.Thread(target=visit, args=(picture,)) for picture in rows]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    assert [len(found) for found in rows.values()] == [1, 1] and rows["flower"] != rows["temple"]
    assert len(set(keys)) == 8 and all(len(key) >= 22 for key in keys)


def test_memory_is_bounded_and_a_failure_leaves_nothing() -> None:
    kept: Cache[bytes] = Cache(10, len)
    first = kept.keep(bytes(4))
    second, third = kept.keep(bytes(4)), kept.keep(bytes(4))
    assert kept.find(first) is None and kept.find(second) and kept.find(third)
    with pytest.raises(ZeroDivisionError):
        kept.get("key", lambda: bytes(1 // 0))
    assert kept.get("key", lambda: b"x") == b"x"


def test_a_run_stands_for_its_best_model(page: Page, folder: Path) -> None:
    base = page.catalogue.base(str(folder))
    assert base.size == 64 and 64 in base.sizes and all(size % 16 == 0 for size in base.sizes) and not base.note


def test_a_taken_port_and_a_wrong_host_are_one_line() -> None:
    taken = listen("127.0.0.1", 0)
    taken.listen()
    with pytest.raises(LinvitError, match="give another --port"):
        listen("127.0.0.1", taken.getsockname()[1])
    taken.close()
    with pytest.raises(LinvitError, match="give --host"):
        listen("no.such.host.invalid", 0)


def test_three_plans_are_one_too_many() -> None:
    with pytest.raises(LinvitError, match="two plans"):
        Catalogue([], ["stella", "mixa", "qt"])


def test_a_detectors_objects_are_drawn(tmp_path: Path) -> None:
    """The maps are those of its backbone, on the picture as it takes it."""
    import timm

    from linvit import save
    from linvit.page import make_app

    torch.manual_seed(0)
    small = {"depth": 2, "embed_dim": 48, "num_heads": 3, "img_size": 64}
    detector = timm.create_model(
        "faster_rcnn", backbone="vit_tiny_patch16_224", backbone_args=small, num_classes=3, pyramid="simple"
    )
    save(detector, tmp_path / "detector")
    name = str(tmp_path / "detector")
    page = Page(Catalogue([name], device="cpu"))
    asked = {"picture": "flower", "model": name, "plan": "stella", "size": min(page.catalogue.base(name).sizes)}
    with TestClient(make_app(page), base_url="http://localhost") as client:
        seen = found(client.post("/api/look", json=asked))
        assert "objects" in seen["answer"] and seen["answer"]["drawn"].startswith("data:image/jpeg")
        layer = seen["layers"][1]
        assert layer["mechanism"] == "stella" and layer["grid"] == [seen["height"] // 16, seen["width"] // 16]
        assert client.get(f"/api/row?look={seen['look']}&layer=1&query=0.5,0.5").status_code == 200
