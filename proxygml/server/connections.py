"""Connections to the server: time-outs and limits that uvicorn lacks, so that nobody keeps others out."""

import asyncio
import os
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_SECONDS = 10.0  # for the header of a request to arrive, since the connection or the last response
REQUEST_SECONDS = 180.0  # from the header of a request to the end of its response
# With those not yet counted and open files, less than the 256 descriptors that macOS allows a process.
MAX_CONNECTIONS, MAX_PER_ADDRESS, BACKLOG = 100, 32, 32


class Connection(H11Protocol):
    """A connection that ends when its time is up. A new one beyond a limit ends the oldest, idle ones first."""

    _timer: asyncio.TimerHandle | None = None
    answering, since = False, 0.0  # whether a request has arrived, and when that became so

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set(answering=False)
        others = [each for each in self.connections if isinstance(each, Connection) and each.is_open and each != self]
        peers = [each for each in others if each.client and self.client and each.client[0] == self.client[0]]
        crowd = peers if len(peers) >= MAX_PER_ADDRESS else others if len(others) >= MAX_CONNECTIONS else []
        if crowd:
            min(crowd, key=lambda each: (each.answering, each.since)).transport.abort()

    def handle_events(self) -> None:
        previous = self.cycle
        super().handle_events()
        if self.cycle is not previous:  # the header of a request has arrived
            self._set(answering=True)

    def on_response_complete(self) -> None:
        self._set(answering=False)
        super().on_response_complete()  # may begin the next request

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    @property
    def is_open(self) -> bool:
        return not self.transport.is_closing()

    def _set(self, *, answering: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.answering, self.since = answering, self.loop.time()
        self._timer = self.loop.call_later(REQUEST_SECONDS if answering else IDLE_SECONDS, self.transport.abort)


class Server(uvicorn.Server):
    """Serves an app on one socket after `run(sockets=[...])`; calls `ready` once requests are answered."""

    def __init__(self, app: FastAPI, ready: Callable[[], None]) -> None:
        config = uvicorn.Config(
            app,
            log_level="error",
            access_log=False,
            timeout_graceful_shutdown=1,
            lifespan="on",
            http=Connection,
            ws="none",
            backlog=BACKLOG,
            proxy_headers=False,  # clients could forge them
            server_header=False,
        )
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(report_error)
        await super().startup(sockets)
        self._ready()


def serve(app: FastAPI, listening: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until Ctrl-C, which ends it within a second."""
    Server(app, ready).run(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on a host and port; port 0 takes a free one."""
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


def report_error(loop: asyncio.AbstractEventLoop, context: dict) -> None:
    """Report an error of the event loop, unless clients cause it: asyncio logs each one with a traceback."""
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)
