"""Which requests are answered: those of our own page, by a name that leads here.

Any site that is open in the same browser can send requests to this machine. They tell where they come from (`Origin`,
`Sec-Fetch-Site`), and are refused. A site whose name is made to lead here (DNS rebinding) has its own name as `Host`.
"""

import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware: the checks above, and headers that keep the page to itself."""

    def __init__(self, app: Any, host: str = "127.0.0.1") -> None:
        self.app = app
        own = () if is_loopback(host) else (socket.gethostname(), socket.getfqdn())
        self.names: set[str] = {name.lower() for name in (*LOOPBACK, host, *own)}
        self.open = not is_loopback(host)

    def leads_here(self, host: str) -> bool:
        """Whether a name is ours. Addresses are never a site's name, but a server for this machine has only its own."""
        name = host.rpartition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
        if name.lower() in self.names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return self.open

    def refusal(self, headers: Headers, path: str) -> str:
        host = headers.get("host", "")
        if not self.leads_here(host):
            return f"this server is not {host or 'without a name'}: open the address that linvit serve printed"
        origin = headers.get("origin")
        if origin is not None and origin.lower() != f"http://{host.lower()}":
            return "requests of other sites are refused"
        site = headers.get("sec-fetch-site", "none")
        followed = path == "/" and headers.get("sec-fetch-mode") == "navigate"  # a link to the page is no harm
        if site not in ("same-origin", "none") and not followed:
            return "requests of other sites are refused"
        return ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            await self.app(scope, receive, send)
            return

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                set_headers(MutableHeaders(scope=message), HEADERS.items())
            await send(message)

        why = self.refusal(Headers(scope=scope), scope["path"])
        if why:
            await JSONResponse({"error": why}, 403)(scope, receive, guarded)
        else:
            await self.app(scope, receive, guarded)


def set_headers(headers: MutableHeaders, pairs: Iterable[tuple[str, str]]) -> None:
    for name, value in pairs:
        headers[name] = value
