"""The page's addresses, and the server behind them.

Long work (a look, a measurement) is answered by lines of JSON: how far it is, then what it found or why not. Whoever
closes the connection has cancelled it.
"""

import asyncio
import json
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import resources
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from torch import Tensor

from linvit.errors import LinvitError
from linvit.figures.attention import SeenLayer
from linvit.page import reading
from linvit.page.cache import Cache
from linvit.page.catalogue import Catalogue
from linvit.page.guard import Guard
from linvit.page.pictures import MOST_BYTES, decode, samples, thumbnail
from linvit.page.sides import Look, Sides, Tell, Wish
from linvit.version import __version__

PICTURES, LOOKS = 256 * 2**20, 2**30  # bytes that are kept of all visitors'
MOST_JSON = 2**16
AT_ONCE = 4  # looks and measurements
WATCH = 0.2  # seconds after which it is seen that nobody waits
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}

log = logging.getLogger(__name__)


class Cancelled(Exception):
    """Nobody waits for this work."""


class Page:
    """What the server knows. Visitors share models and nothing else: whose picture or look it is, only they know."""

    def __init__(self, catalogue: Catalogue, size: int | None = None) -> None:
        self.catalogue, self.sides, self.size = catalogue, Sides(catalogue), size
        self.pictures: Cache[Tensor] = Cache(PICTURES, lambda picture: picture.nbytes)
        self.looks: Cache[Look] = Cache(LOOKS, lambda look: look.bytes)
        self.pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="linvit-page")

    def warm(self) -> None:
        """Do once what the first visitor would wait for."""
        choices = self.catalogue.choices()
        for side in choices["sides"]:
            size = self.usual_size(side["model"])
            self.look({**side, "size": size, "picture": next(iter(samples()))}, lambda _: None)

    def usual_size(self, model: str) -> int:
        base = self.catalogue.base(model)
        if self.size is not None and self.size not in base.sizes:
            shown = ", ".join(map(str, base.sizes))
            raise LinvitError(f"--size {self.size}: {model} is shown at {shown} pixels")
        return self.size or base.size

    def picture(self, key: Any) -> Tensor:
        found = samples().get(key) if isinstance(key, str) else None
        found = self.pictures.find(key) if found is None and isinstance(key, str) else found
        if found is None:
            raise HTTPException(404, "the picture is no longer here: drop it again")
        return found

    def seen(self, key: str) -> Look:
        found = self.looks.find(key)
        if found is None:
            raise HTTPException(404, "this look is no longer here: look again")
        return found

    def look(self, asked: dict[str, Any], tell: Tell) -> dict[str, Any]:
        pixels = self.picture(asked.get("picture"))
        tell({"stage": "opening the model"})
        side = self.sides.get(self.wish(asked), tell)
        found = side.see(pixels, tell)
        return {"look": self.looks.keep(found), "size": side.size, "notes": side.notes, **found.to_dict()}

    def latency(self, asked: dict[str, Any], tell: Tell) -> dict[str, Any]:
        tell({"stage": "opening the models"})
        return self.sides.latency([self.wish({**side, "size": asked.get("size")}) for side in asked["sides"]], tell)

    def wish(self, asked: dict[str, Any]) -> Wish:
        model, plan, size = (asked.get(name) for name in ("model", "plan", "size"))
        if not isinstance(model, str) or not isinstance(plan, str) or not isinstance(size, int | None):
            raise LinvitError("give model and plan as text and size as a number")
        return Wish(model, plan.strip(), size or self.usual_size(model))


def make_app(page: Page, host: str = "127.0.0.1") -> Starlette:
    """The application, which answers requests for `host` and for this machine by its own names."""

    async def home(request: Request) -> Response:
        return file("page.html")

    async def style(request: Request) -> Response:
        return file("page.css", before=report_style())

    async def script(request: Request) -> Response:
        return file(f"{request.path_params['name']}.js")

    async def icon(request: Request) -> Response:
        return Response(status_code=204)

    async def choices(request: Request) -> Response:
        offered = page.catalogue.choices()
        return JSONResponse({**offered, "samples": list(samples()), "version": __version__, "most_bytes": MOST_BYTES})

    async def model(request: Request) -> Response:
        name = request.query_params.get("name", "")
        base = await run_in_threadpool(page.catalogue.base, name)
        return JSONResponse({"name": name, "sizes": base.sizes, "size": page.usual_size(name), "note": base.note})

    async def sample(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in samples():
            raise HTTPException(404, "there is no such picture")
        return Response(thumbnail(name), media_type="image/jpeg")

    async def send_picture(request: Request) -> Response:
        data = await body(request, MOST_BYTES)
        pixels = await run_in_threadpool(decode, data)
        return JSONResponse(
            {"picture": page.pictures.keep(pixels), "height": pixels.shape[1], "width": pixels.shape[2]}
        )

    async def look(request: Request) -> Response:
        asked = await fields(request)
        page.picture(asked.get("picture"))
        page.catalogue.plan(page.wish({**asked, "size": 1}).plan)
        return stream(request, page.pool, partial(page.look, asked))

    async def latency(request: Request) -> Response:
        asked = await fields(request)
        sides = asked.get("sides")
        if not isinstance(sides, list) or len(sides) != 2 or not all(isinstance(side, dict) for side in sides):
            raise LinvitError("give two sides")
        return stream(request, page.pool, partial(page.latency, asked))

    async def row(request: Request) -> Response:
        asked = request.query_params
        found = page.seen(asked.get("look", ""))
        layer = layer_of(found, asked.get("layer", "-1"))
        drawn = partial(reading.row, found, layer, asked.get("show", "attention"), asked.get("query", "all"))
        grid, values = await run_in_threadpool(drawn, asked.get("head", "mean"))
        return Response(reading.packed(grid, values), media_type="application/octet-stream")

    async def features(request: Request) -> Response:
        looks, layers = (request.query_params.get(name, "").split(",") for name in ("looks", "layers"))
        if len(looks) != len(layers):
            raise LinvitError("give a layer for each look")
        chosen = [layer_of(page.seen(key), which) for key, which in zip(looks, layers, strict=True)]
        return JSONResponse(await run_in_threadpool(reading.colours, chosen))

    routes = [
        Route("/", home),
        Route("/page.css", style),
        Route("/favicon.ico", icon),
        Route("/js/{name:str}.js", script),
        Route("/api/choices", choices),
        Route("/api/model", model),
        Route("/api/samples/{name:str}", sample),
        Route("/api/pictures", send_picture, methods=["POST"]),
        Route("/api/look", look, methods=["POST"]),
        Route("/api/latency", latency, methods=["POST"]),
        Route("/api/row", row),
        Route("/api/features", features),
    ]
    handlers: Any = {LinvitError: refused, HTTPException: failed, Exception: broken}
    return Starlette(routes=routes, middleware=[Middleware(Guard, host=host)], exception_handlers=handlers)


def layer_of(look: Look, which: str) -> SeenLayer:
    if not which.removeprefix("-").isdecimal():
        raise LinvitError(f"a layer is a number, not '{which}'")
    return look.seen.layer(int(which))


async def refused(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": in_a_line(error)}, 422)


async def failed(request: Request, error: Any) -> Response:
    return JSONResponse({"error": str(error.detail)}, error.status_code)


async def broken(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": "the server made a mistake: its terminal tells more"}, 500)


def in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())


async def body(request: Request, most: int) -> bytes:
    """What was sent, if it is not too much; no more than that is read."""
    length = request.headers.get("content-length", "")
    data = bytearray()
    if not length.isdecimal() or int(length) <= most:
        async for part in request.stream():
            data += part
            if len(data) > most:
                break
        else:
            return bytes(data)
    raise HTTPException(413, f"the file is too large: at most {most // 2**20} MiB are taken, make it smaller")


async def fields(request: Request) -> dict[str, Any]:
    try:
        found = json.loads(await body(request, MOST_JSON))
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise LinvitError("give a JSON object")
    return found


def stream(request: Request, pool: ThreadPoolExecutor, work: Callable[[Tell], dict[str, Any]]) -> Response:
    """Work in another thread, told line by line; it ends at its next step when the visitor is gone."""

    async def lines() -> AsyncIterator[str]:
        loop, gone = asyncio.get_running_loop(), threading.Event()
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        def put(event: dict[str, Any] | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(queue.put_nowait, event)

        def tell(event: dict[str, Any]) -> None:
            if gone.is_set():
                raise Cancelled
            put(event)

        def run() -> None:
            try:
                tell({"found": work(tell)})
            except Cancelled:
                pass
            except HTTPException as error:
                put({"error": error.detail})
            except LinvitError as error:
                put({"error": in_a_line(error)})
            except Exception as error:
                log.exception("the page's work failed")
                put({"error": f"the server made a mistake ({type(error).__name__}): its terminal tells more"})
            finally:
                put(None)

        pool.submit(run)
        try:
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), WATCH)
                except TimeoutError:
                    if await request.is_disconnected():
                        return
                    continue
                if event is None:
                    return
                yield json.dumps(event, allow_nan=False) + "\n"
        except ClientDisconnect:
            return
        finally:
            gone.set()

    return StreamingResponse(lines(), media_type="application/x-ndjson")


def file(name: str, before: str = "") -> Response:
    path = resources.files(__package__) / "page_files" / name
    if not path.is_file():
        raise HTTPException(404, "there is no such file")
    return Response(before + path.read_text(encoding="utf-8"), media_type=TYPES[name.rpartition(".")[2]])


def report_style() -> str:
    """The report's, for both are one look."""
    folder = resources.files("linvit") / "comparison" / "reporting" / "page_files"
    return (folder / "page.css").read_text(encoding="utf-8")


def run_server(page: Page, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C. `ready` hears the address."""
    listening = listen(host, port)
    listening.listen()  # who comes as soon as the address is told waits and is not turned away
    address = f"[{host}]" if ":" in host else host
    config = uvicorn.Config(
        make_app(page, host),
        log_level="error",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="off",  # nothing begins or ends with the server, and a second Ctrl-C would be complained of
        timeout_graceful_shutdown=1,
        limit_concurrency=64,
    )
    server = uvicorn.Server(config)
    ready(f"http://{address}:{listening.getsockname()[1]}/")
    try:
        server.run(sockets=[listening])
    except KeyboardInterrupt:  # which uvicorn raises again after it has ended
        pass
    finally:
        page.pool.shutdown(wait=False, cancel_futures=True)
        listening.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address, or one line why there is none."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        found = socket.socket(family, socket.SOCK_STREAM)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
    except socket.gaierror:
        raise LinvitError(f"there is no host {host}: give --host an address of this machine") from None
    except OSError as error:
        raise LinvitError(f"cannot listen at {host}:{port} ({error.strerror}): give another --port") from None
    return found
