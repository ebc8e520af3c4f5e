"""The HTTP server: one app with the API, and with the page if it displays a space."""

import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from proxygml.files import one_line
from proxygml.server.api import create_router
from proxygml.server.guards import Guard
from proxygml.server.items import Items
from proxygml.server.jobs import NotReadyError
from proxygml.server.page import create_page
from proxygml.server.responses import Responses
from proxygml.server.schema import with_dimension
from proxygml.server.space import Space
from proxygml.version import __version__


def create_app(items: Items, *, token: str | None = None, local: bool = True) -> FastAPI:
    """The API for these items, and the page of a space.

    A `local` server answers this machine without the token, but changes no items. Any other needs it always.
    """
    server_id = secrets.token_urlsafe(8)  # in thumbnail URLs: browsers must not reuse those of another server
    responses = Responses(items, server_id) if isinstance(items, Space) else None

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if responses is not None:
            responses.start_jobs()
        yield
        if responses is not None:
            responses.stop_jobs()

    # The pages /docs and /redoc would load scripts from elsewhere.
    app = FastAPI(title="proxygml", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.include_router(create_router(items))
    if responses is not None:
        app.state.responses = responses
        app.include_router(create_page(responses, token))
    app.openapi_schema = with_dimension(app.openapi(), items.dim)
    app.add_middleware(Guard, token=token, local=local, server_id=server_id)

    @app.exception_handler(HTTPException)
    def http_error(_: Request, error: HTTPException) -> JSONResponse:
        is_ours = error.detail != HTTPStatus(error.status_code).phrase
        detail = error.detail if is_ours else f"{error.detail}: the addresses are in /openapi.json"
        return JSONResponse({"error": detail}, error.status_code, error.headers)

    @app.exception_handler(RequestValidationError)
    def invalid_request(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            return JSONResponse({"error": f"expected JSON, but {first['ctx']['error']}"}, 400)
        if first["type"] == "model_attributes_type" and len(first["loc"]) == 1:
            return JSONResponse(
                {"error": "expected a JSON object, with the header Content-Type: application/json"}, 422
            )
        where = ".".join(str(part) for part in first["loc"][1:]) or "the request"
        return JSONResponse({"error": f"{where}: {first['msg'].removeprefix('Value error, ')}"}, 422)

    @app.exception_handler(NotReadyError)
    def not_ready(_: Request, error: NotReadyError) -> JSONResponse:
        return JSONResponse({"error": str(error)}, 409)

    @app.exception_handler(ClientDisconnect)
    def gone(_: Request, error: ClientDisconnect) -> JSONResponse:
        return JSONResponse({"error": "the request has ended early"}, 400)  # nobody reads it

    @app.exception_handler(OSError)
    def not_available(_: Request, error: OSError) -> JSONResponse:
        return JSONResponse({"error": one_line(error)}, 503)

    @app.exception_handler(ValueError)
    def failed(_: Request, error: ValueError) -> JSONResponse:
        return JSONResponse({"error": one_line(error)}, 500)  # as a damaged index

    return app
