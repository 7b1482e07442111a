"""A small model behind a real server, which all tests of the page share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
import uvicorn
from starlette.testclient import TestClient

from linvit import convert, save
from linvit.page import Page, make_app
from linvit.page.app import listen
from linvit.page.catalogue import Catalogue


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a saved model in it, of two layers for images of 64 pixels."""
    torch.manual_seed(0)
    args = {"img_size": 64, "depth": 2, "num_classes": 5, "embed_dim": 48, "num_heads": 3}
    model = timm.create_model("vit_tiny_patch16_224", **args)
    convert(model, "softmax")
    run = tmp_path_factory.mktemp("run")
    save(model, run / "best")
    return run


@pytest.fixture(scope="package")
def page(folder: Path) -> Page:
    return Page(Catalogue([str(folder)], ["as it is", "stella"], pretrained=False, device="cpu"))


@pytest.fixture
def client(page: Page) -> Iterator[TestClient]:
    with TestClient(make_app(page), base_url="http://127.0.0.1:8765", raise_server_exceptions=False) as opened:
        yield opened


@pytest.fixture(scope="package")
def address(page: Page) -> Iterator[str]:
    """Where a real server listens."""
    listening = listen("127.0.0.1", 0)
    config = uvicorn.Config(make_app(page), log_level="error", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}/"
    server.should_exit = True
    thread.join(5)
    listening.close()
