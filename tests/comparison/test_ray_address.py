"""An address at which there is no Ray cluster."""

from __future__ import annotations

import socketserver
import threading
import time

import pytest

from linvit.comparison.scheduling.places.ray import connect
from linvit.errors import LinvitError


class Http(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.rfile.readline()
        self.wfile.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize("host", ["127.0.0.1:1", "127.0.0.1:99999", f"{'a' * 80}:1", "nonsense", "http"])
def test_where_no_cluster_answers_it_says_so(host: str) -> None:
    """At once, and in one line: also where something else does."""
    with socketserver.TCPServer(("127.0.0.1", 0), Http) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_address[1]}" if host == "http" else host
        began = time.monotonic()
        with pytest.raises(LinvitError, match=r"(no Ray cluster answers at|cannot connect to a Ray cluster) .*: start"):
            connect(pytest.importorskip("ray"), address)
        assert time.monotonic() - began < 10
        server.shutdown()
