"""No test leaves workers behind: those of the next one would inherit them, and wait for them at their end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from linvit.tasks.classify.streaming import Streamed


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[Streamed] = []
    begin = Streamed.__init__

    def noted(self: Streamed, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(Streamed, "__init__", noted)
    yield
    for streamed in made:
        streamed.close()
