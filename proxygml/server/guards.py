"""Access control: the server answers this machine's own browser or holders of a token, never pages of other sites."""

import secrets

from fastapi import Request
from fastapi.responses import RedirectResponse

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def new_token() -> str:
    """256 random bits."""
    return secrets.token_urlsafe(32)


def rejection(request: Request, token: str | None, server_id: str) -> str:
    """Why a request is rejected, or an empty string.

    A page of another site may send requests to this machine, under its own name (DNS rebinding) or ours. On a network
    any name may be ours, but only our own page has the cookie.
    """
    host = request.headers.get("host", "")
    name = host.rsplit(":", 1)[0].strip("[]") if not host.endswith("]") else host.strip("[]")
    if token is None and name.lower() not in LOOPBACK:
        return f"this page is only for {LOOPBACK[0]}, not for {name[:100]}: open it there, or start it with --host"
    if token is not None and not _equal(request.cookies.get(_cookie_name(server_id), ""), token):
        return "this page needs its token: open the whole address that proxygml browse printed"
    origin = request.headers.get("origin")
    # Browsers send Sec-Fetch-Site even without an origin, for example for an image. Links from other sites are allowed.
    is_link = request.url.path == "/" and request.headers.get("sec-fetch-mode") == "navigate"
    same_site = request.headers.get("sec-fetch-site", "none") in ("none", "same-origin") or is_link
    if not same_site or (origin is not None and origin.split("://")[-1] != host):
        return "requests from pages of other sites are rejected"
    return ""


def has_token(request: Request, token: str) -> bool:
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
