"""The routes of the page, for the page alone; it searches and embeds by the API. Requests name images by number."""

import secrets
from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import HTMLResponse

from proxygml.server import guards
from proxygml.server.images import SIDES, Thumbnails
from proxygml.server.responses import Responses, check_number

PAGE = Path(__file__).with_name("page.html")


def create_page(responses: Responses, token: str | None) -> APIRouter:
    """The page of a space, its data and its thumbnails."""
    router = APIRouter(include_in_schema=False)
    space, thumbnails = responses.space, Thumbnails(responses.space)

    @router.get("/")
    def page(request: Request) -> Response:
        if token is not None and guards.url_has_token(request, token):
            return guards.redirect_with_cookie(token, responses.server_id)
        nonce = secrets.token_urlsafe(16)
        policy = (
            f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; img-src 'self' blob: data:; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        text = PAGE.read_text(encoding="utf-8").replace("{{nonce}}", nonce)
        return HTMLResponse(text, headers={"Content-Security-Policy": policy})

    routes: dict[str, Callable] = {
        "/page/space": responses.about,
        "/page/classes": responses.classes,
        "/page/right": responses.right,
        "/page/images": responses.images,
        "/page/images/{number}": responses.image,
        "/page/confusions": responses.confusions,
        "/page/confusions/{first}/{second}": responses.confused,
        "/page/jobs": responses.progress,
        "/page/map/{layout}": responses.points,
    }
    for path, route in routes.items():
        router.get(path)(route)
    router.post("/page/subgraph")(responses.subgraph)
    router.post("/page/jobs/{name}")(responses.start)
    router.delete("/page/jobs/{name}")(responses.cancel)

    @router.get("/page/thumbnails/{number}")
    def thumbnail(number: int, side: int = SIDES[0]) -> Response:
        if space.open_image is None:
            raise HTTPException(404, "these vectors have no images")
        if side not in SIDES:
            raise HTTPException(422, f"expected a side among {', '.join(map(str, SIDES))}, got {side}")
        check_number(number, len(space), "image")
        contents, media_type = thumbnails.get(number, side)
        caching = "no-store" if media_type == "image/svg+xml" else "private, max-age=3600"
        return Response(contents, media_type=media_type, headers={"Cache-Control": caching})

    return router
