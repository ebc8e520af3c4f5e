"""The HTTP server of the page. Requests name images by number; no path in a request is ever opened as a file."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException as StarletteHTTPException

from proxygml.server import guards
from proxygml.server.images import SIDES, Thumbnails, read_upload
from proxygml.server.jobs import NotReadyError
from proxygml.server.responses import Count, Responses, check_number
from proxygml.server.space import Space

MAX_UPLOAD_BYTES = 64 * 2**20  # a photo of 100 megapixels has about 40 MB
MAX_UPLOADS, UPLOAD_SECONDS = 2, 60.0  # at a time, as each may take a gigabyte; time for one to arrive
PAGE = Path(__file__).with_name("page.html")


def create_app(space: Space, *, token: str | None = None) -> FastAPI:
    """The page of a space, for this machine alone or for anyone with the token."""
    server_id = secrets.token_urlsafe(8)  # in thumbnail URLs: browsers must not reuse those of another server
    responses, thumbnails, uploads = Responses(space, server_id), Thumbnails(space), asyncio.Semaphore(MAX_UPLOADS)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        responses.start_jobs()
        yield
        responses.stop_jobs()

    app = FastAPI(title="proxygml browse", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.responses = responses

    @app.middleware("http")
    async def check_access(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        if token is not None and guards.has_token(request, token):
            response: Response = guards.redirect_with_cookie(token, server_id)
        else:
            reason = guards.rejection(request, token, server_id)
            response = JSONResponse({"error": reason}, 403) if reason else await call_next(request)
        response.headers.setdefault("Cache-Control", "no-store")
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        response.headers["Referrer-Policy"] = "no-referrer"
        return response

    @app.exception_handler(StarletteHTTPException)
    def http_error(_: Request, error: StarletteHTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code)

    @app.exception_handler(RequestValidationError)
    def invalid_request(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        return JSONResponse({"error": f"{first['loc'][-1]}: {first['msg']}"}, 422)

    @app.exception_handler(NotReadyError)
    def not_ready(_: Request, error: NotReadyError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 409)

    @app.get("/")
    def page() -> HTMLResponse:
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' blob: data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        text = PAGE.read_text(encoding="utf-8").replace("{{nonce}}", nonce)
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    routes: dict[str, Callable] = {
        "/api/space": responses.about,
        "/api/classes": responses.classes,
        "/api/right": responses.right,
        "/api/images": responses.images,
        "/api/images/{number}": responses.image,
        "/api/confusions": responses.confusions,
        "/api/confusions/{first}/{second}": responses.confused,
        "/api/jobs": responses.progress,
        "/api/map/{layout}": responses.points,
    }
    for path, route in routes.items():
        app.get(path)(route)
    app.post("/api/jobs/{name}")(responses.start)
    app.delete("/api/jobs/{name}")(responses.cancel)

    @app.post("/api/uploads")
    async def upload(request: Request, count: Count = 24) -> dict:
        if space.embed_image is None:
            raise HTTPException(409, space.no_upload)
        async with uploads:
            try:
                contents = await asyncio.wait_for(_read(request), UPLOAD_SECONDS)
                return await run_in_threadpool(lambda: responses.upload(read_upload(contents), count))
            except asyncio.TimeoutError as error:
                raise HTTPException(408, f"the file took more than {UPLOAD_SECONDS:.0f} s to arrive") from error
            except ValueError as error:
                raise HTTPException(415, str(error)) from error

    @app.get("/thumbnails/{number}")
    def thumbnail(number: int, side: int = SIDES[0]) -> Response:
        if space.open_image is None:
            raise HTTPException(404, "these vectors have no images")
        if side not in SIDES:
            raise HTTPException(422, f"expected a side among {', '.join(map(str, SIDES))}, got {side}")
        check_number(number, len(space), "image")
        contents, media_type = thumbnails.get(number, side)
        caching = "no-store" if media_type == "image/svg+xml" else "private, max-age=3600"
        return Response(contents, media_type=media_type, headers={"Cache-Control": caching})

    return app


async def _read(request: Request) -> bytes:
    """The body of a request; an error as soon as it is known to be too large."""
    too_large = HTTPException(413, f"the file is larger than {MAX_UPLOAD_BYTES // 2**20} MB: make it smaller")
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > MAX_UPLOAD_BYTES:
        raise too_large
    contents = bytearray()
    async for part in request.stream():
        contents += part
        if len(contents) > MAX_UPLOAD_BYTES:
            raise too_large
    return bytes(contents)
