"""The page's server: what it is asked, it answers by an image's number; no path of a request ever becomes a file."""

import asyncio
import os
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from fastapi import FastAPI, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from proxygml.server import guards
from proxygml.server.answers import Answers
from proxygml.server.pictures import SIDES, Thumbnails, read_upload
from proxygml.server.space import Space

LARGEST_UPLOAD = 20 * 2**20  # bytes
UPLOADS, UPLOAD_SECONDS = 2, 60.0  # at a time, since each may take half a gigabyte; and how long one may take to arrive
MOST_CONNECTIONS = 200  # others are told to come again
PAGE = Path(__file__).with_name("page.html")
Layout = Literal["pca", "tsne", "umap"]
Count = Annotated[int, Query(ge=1, le=200)]


def create_app(space: Space, *, token: str | None = None) -> FastAPI:
    """The page for a space: for this machine alone, or for whoever has the token."""
    answers, thumbnails = Answers(space), Thumbnails(space)
    uploads = asyncio.Semaphore(UPLOADS)
    mark = secrets.token_urlsafe(8)  # of this server: pictures that a browser kept of another one are not shown

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        answers.begin()
        yield
        answers.end()

    app = FastAPI(title="proxygml browse", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.answers = answers

    @app.middleware("http")
    async def guarded(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if token is not None and guards.brings(request, token):
            response: Response = guards.admitted(token, mark)
        else:
            refusal = guards.refusal(request, token, mark)
            response = JSONResponse({"error": refusal}, 403) if refusal else await call_next(request)
        response.headers.setdefault("Cache-Control", "no-store")
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    @app.exception_handler(StarletteHTTPException)
    def failed(_: Request, error: StarletteHTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    @app.exception_handler(RequestValidationError)
    def misunderstood(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"error": f"{first['loc'][-1]}: {first['msg']}"}, 422)

    @app.get("/")
    def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' blob: data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        text = PAGE.read_text(encoding="utf-8").replace("{{nonce}}", nonce)
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    @app.get("/api/space")
    def about() -> dict:
        return answers.about() | {"mark": mark}

    @app.get("/api/classes")
    def classes() -> Response:
        return Response(space.classes.astype("<i4").tobytes(), media_type="application/octet-stream")

    @app.get("/api/right")
    def right() -> Response:
        if answers.failures.state != "done":
            raise HTTPException(409, "which images fail is not known yet")
        nearest = answers.failures.result.first_right == 1  # (M,)
        return Response(nearest.astype(np.uint8).tobytes(), media_type="application/octet-stream")

    @app.get("/api/images")
    def images(
        text: Annotated[str, Query(max_length=200)] = "",
        class_number: Annotated[int | None, Query(ge=0, lt=2**31)] = None,
        order: Literal["number", "rank", "share"] = "number",
        start: Annotated[int, Query(ge=0, lt=2**31)] = 0,
        count: Count = 60,
    ) -> dict:
        if order != "number" and answers.failures.state != "done":
            raise HTTPException(409, "which images fail is not known yet")
        return answers.images(text, class_number, order, start, count)

    @app.get("/api/images/{number}")
    def image(number: int, count: Count = 24) -> dict:
        return answers.image(_existing(number, space), count)

    @app.post("/api/uploads")
    async def upload(request: Request, count: Count = 24) -> dict:
        if space.embed_image is None:
            raise HTTPException(409, space.no_upload)
        async with uploads:
            try:
                contents = await asyncio.wait_for(_read(request), UPLOAD_SECONDS)
                return await run_in_threadpool(lambda: answers.upload(read_upload(contents), count))
            except asyncio.TimeoutError as error:
                raise HTTPException(408, f"the file took more than {UPLOAD_SECONDS:.0f} s to arrive") from error
            except ValueError as error:
                raise HTTPException(415, str(error)) from error

    @app.get("/api/confusions")
    def confusions() -> list[dict]:
        if answers.failures.state != "done":
            raise HTTPException(409, "which classes are confused is not known yet")
        return answers.confusions()

    @app.get("/api/confusions/{first}/{second}")
    def mistaken(first: int, second: int, count: Count = 100) -> dict:
        if answers.failures.state != "done":
            raise HTTPException(409, "which classes are confused is not known yet")
        for number in (first, second):
            if not 0 <= number < len(space.class_names):
                raise HTTPException(404, f"there is no class {number}: there are {len(space.class_names)}")
        return answers.mistaken(first, second, count)

    @app.get("/api/jobs")
    def jobs() -> dict[str, dict]:
        return answers.progress()

    @app.post("/api/jobs/{name}")
    def start(name: Literal["failures", "pca", "tsne", "umap"]) -> dict:
        if reason := answers.why_not(name):
            raise HTTPException(409, reason)
        answers.jobs[name].start()
        return answers.jobs[name].told()

    @app.delete("/api/jobs/{name}")
    def cancel(name: Literal["failures", "pca", "tsne", "umap"]) -> dict:
        answers.jobs[name].cancel()
        return answers.jobs[name].told()

    @app.get("/api/map/{layout}")
    def points(layout: Layout) -> Response:
        if answers.jobs[layout].state != "done":
            raise HTTPException(409, "this map is not drawn yet")
        drawn: np.ndarray = answers.jobs[layout].result
        return Response(drawn.astype("<f4").tobytes(), media_type="application/octet-stream")

    @app.get("/thumbnails/{number}")
    def thumbnail(number: int, side: int = SIDES[0]) -> Response:
        if space.open_image is None:
            raise HTTPException(404, "these vectors have no images")
        if side not in SIDES:
            raise HTTPException(422, f"expected a side among {', '.join(map(str, SIDES))}, got {side}")
        contents, kind = thumbnails.of(_existing(number, space), side)
        kept = "no-store" if kind.endswith("svg+xml") else "private, max-age=3600"
        return Response(contents, media_type=kind, headers={"Cache-Control": kept})

    return app


def _existing(number: int, space: Space) -> int:
    if not 0 <= number < len(space):
        raise HTTPException(404, f"there is no image {number}: there are {len(space)}, counted from 0")
    return number


async def _read(request: Request) -> bytes:
    """The body of a request; refused as soon as it is known to be too large."""
    too_large = HTTPException(413, f"the file is larger than {LARGEST_UPLOAD // 2**20} MB: make it smaller")
    announced = request.headers.get("content-length", "0")
    if announced.isdigit() and int(announced) > LARGEST_UPLOAD:
        raise too_large
    contents = bytearray()
    async for part in request.stream():
        contents += part
        if len(contents) > LARGEST_UPLOAD:
            raise too_large
    return bytes(contents)


def listen(host: str, port: int) -> socket.socket:
    """A socket at host and port, 0 for a free one."""
    if not 0 <= port < 2**16:
        raise ValueError(f"expected a port from 0 to 65535, got {port}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(
            f"cannot listen on {host}, port {port} ({reason}): try another --port, 0 for a free one"
        ) from error


def serve(app: FastAPI, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Answer until Ctrl-C, which ends it within a second; `ready` is called when it begins to answer."""
    import uvicorn

    class Announced(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        timeout_graceful_shutdown=1,
        lifespan="on",
        limit_concurrency=MOST_CONNECTIONS,
        proxy_headers=False,  # what a request says of where it comes from is nobody's word but its own
        server_header=False,
    )
    Announced(config).run(sockets=[listening])
