"""Access control: the server answers this machine or holders of a token, never pages of other sites.

A page of another site may send requests to this machine, under its own name (DNS rebinding) or ours. On a network any
name may be ours, but only our own page has the cookie, and only our clients have the token.
"""

import secrets

from fastapi import HTTPException, Request
from fastapi.responses import JSONResponse, RedirectResponse
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MIN_TOKEN_LENGTH = 16
MAX_UPLOAD_BYTES = 64 * 2**20  # a photo of 100 megapixels has about 40 MB
MAX_JSON_BYTES = 4 * 2**20
IMAGE_ROUTES = ("/v1/embed", "/v1/search/image", "/v1/classify/image", "/v1/items/image")
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}


def new_token() -> str:
    """256 random bits."""
    return secrets.token_urlsafe(32)


def check_token(token: str) -> str:
    """A token that a user has chosen."""
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"expected {MIN_TOKEN_LENGTH} or more ASCII characters without spaces in PROXYGML_TOKEN, got {len(token)}: "
            "unset it, and a token is made and printed"
        )
    return token


class Guard:
    """ASGI middleware: rejects requests without the token, of other sites, and with too large a body.

    A `local` server answers reading requests under the names of this machine without the token.
    """

    def __init__(self, app: ASGIApp, *, token: str | None, local: bool, server_id: str) -> None:
        self.app, self.token, self.local, self.server_id = app, token, local, server_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        status, reason = self._reject(Request(scope))
        authenticate = {"WWW-Authenticate": "Bearer"} if status == 401 else None
        app = JSONResponse({"error": reason}, status, authenticate) if status else self.app
        await app(scope, limited(scope, receive), send_with_headers)

    def _reject(self, request: Request) -> tuple[int, str]:
        """The status and the reason of a rejection; status 0 if there is none."""
        host = request.headers.get("host", "")
        name = host.rsplit(":", 1)[0].strip("[]") if not host.endswith("]") else host.strip("[]")
        if self.token is None or not self._has_token(request, self.token):
            if not self.local:
                return 401, "a token is needed: send the header Authorization: Bearer TOKEN, or open the whole address"
            if name.lower() not in LOOPBACK:
                remedy = "open it there, or start it with --host"
                return 403, f"this server is only for {LOOPBACK[0]}, not for {name[:100]}: {remedy}"
            if self.token is not None and request.url.path.startswith("/v1/items"):
                return 401, "items are added and removed with the token: send the header Authorization: Bearer TOKEN"
        origin = request.headers.get("origin")
        # Browsers send Sec-Fetch-Site even without an origin, for example for an image. Links from other sites are
        # allowed.
        is_link = request.url.path == "/" and request.headers.get("sec-fetch-mode") == "navigate"
        same_site = request.headers.get("sec-fetch-site", "none") in ("none", "same-origin") or is_link
        if not same_site or (origin is not None and origin.split("://")[-1] != host):
            return 403, "requests from pages of other sites are rejected"
        return 0, ""

    def _has_token(self, request: Request, token: str) -> bool:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        has_bearer = scheme.lower() == "bearer" and _equal(bearer.strip(), token)
        has_cookie = _equal(request.cookies.get(_cookie_name(self.server_id), ""), token)
        return has_bearer or has_cookie or url_has_token(request, token)


def limited(scope: Scope, receive: Receive) -> Receive:
    """Receives the body of a request; an error as soon as it is known to be too large."""
    limit = MAX_UPLOAD_BYTES if scope["path"] in IMAGE_ROUTES else MAX_JSON_BYTES
    length = dict(scope["headers"]).get(b"content-length", b"0")
    received = int(length) if length.isdigit() and int(length) > limit else 0

    async def receive_limited() -> Message:
        nonlocal received
        message = {} if received > limit else await receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise HTTPException(413, f"the request is larger than {limit // 2**20} MB: send less")
        return message

    return receive_limited


def url_has_token(request: Request, token: str) -> bool:
    """Whether this is a request for the page with the token in its URL."""
    return request.url.path == "/" and _equal(request.query_params.get("token", ""), token)


def redirect_with_cookie(token: str, server_id: str) -> RedirectResponse:
    """Redirect to the page without the token in its URL; the browser keeps the token in a session cookie."""
    response = RedirectResponse("/", 303)
    # Lax: a page of another site may link here.
    response.set_cookie(_cookie_name(server_id), token, httponly=True, samesite="lax")
    return response


def _cookie_name(server_id: str) -> str:
    return f"proxygml-{server_id}"  # servers on other ports of a host get the same cookies


def _equal(value: str, token: str) -> bool:
    return secrets.compare_digest(value.encode("utf-8", "surrogatepass"), token.encode())
