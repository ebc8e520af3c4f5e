"""Who may ask the page's server: this machine's own browser, or whoever has its token; never a page of another site."""

import secrets

from fastapi import Request
from fastapi.responses import RedirectResponse

LOOPBACK = ("127.0.0.1", "localhost", "::1")


def new_token() -> str:
    """256 bits by chance: nobody guesses it."""
    return secrets.token_urlsafe(32)


def refusal(request: Request, token: str | None, mark: str) -> str:
    """Why a request is refused, or an empty text. `mark` is that of the server, in the name of its cookie.

    A page of another site may send requests to this machine, under its own name (DNS rebinding) or ours. On a network
    any name may be ours, but only our own has the cookie.
    """
    host = request.headers.get("host", "")
    name = host.rsplit(":", 1)[0].strip("[]") if not host.endswith("]") else host.strip("[]")
    if token is None and name.lower() not in LOOPBACK:
        return f"this page is for {LOOPBACK[0]} alone, not for {name[:100]}: open it there, or start it with --host"
    if token is not None and not _same(request.cookies.get(_cookie(mark), ""), token):
        return "this page needs its token: open the whole address that proxygml browse has printed"
    origin = request.headers.get("origin")
    if origin is not None and origin.split("://")[-1] != host:
        return "requests from pages of other sites are refused"
    # Browsers say so of every request, also of those that come without an origin, as for a picture. A link is fine.
    link = request.url.path == "/" and request.headers.get("sec-fetch-mode") == "navigate"
    if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and not link:
        return "requests from pages of other sites are refused"
    return ""


def brings(request: Request, token: str) -> bool:
    """Whether a request is for the page, with the token in its address."""
    return request.url.path == "/" and _same(request.query_params.get("token", ""), token)


def admitted(token: str, mark: str) -> RedirectResponse:
    """The page without the token in its address; the browser keeps it as a cookie until it is closed."""
    response = RedirectResponse("/", 303)
    # Lax: a link on a page of another site may lead here. The name differs, as ports of a host share their cookies.
    response.set_cookie(_cookie(mark), token, httponly=True, samesite="lax")
    return response


def _cookie(mark: str) -> str:
    return f"proxygml-{mark}"


def _same(given: str, token: str) -> bool:
    return secrets.compare_digest(given.encode("utf-8", "surrogatepass"), token.encode())
