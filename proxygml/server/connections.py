"""Connections to the server: time-outs and limits that uvicorn lacks, so that nobody keeps others out."""

import asyncio
import json
import os
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_SECONDS = 10.0  # for the header of a request to arrive, since the connection or the last response
REQUEST_SECONDS = 180.0  # from the header of a request to the end of its response
NEW_SECONDS = 1.0  # in which a new connection is not ended to make way: its request may be on the way
# With those not yet counted and open files, less than the 256 descriptors that macOS allows a process.
MAX_CONNECTIONS, MAX_PER_ADDRESS, BACKLOG = 100, 32, 32
QUEUE = 1024  # connections that the system keeps until they are counted; clients beyond it wait for seconds
ERROR = json.dumps({"error": "too many requests at once: send fewer, then this one again"})
TOO_MANY = (
    "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nRetry-After: 1\r\n"
    f"Content-Length: {len(ERROR)}\r\n\r\n{ERROR}"
)


class Connection(H11Protocol):
    """A connection that ends when its time is up.

    Beyond a limit, a new one ends the oldest of those that wait for their client, idle ones first; or else itself.
    """

    _timer: asyncio.TimerHandle | None = None
    answering, since = False, 0.0  # whether a request has arrived, and when that became so

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set(answering=False)
        others = [each for each in self.connections if isinstance(each, Connection) and each.is_open and each != self]
        peers = [each for each in others if each.client and self.client and each.client[0] == self.client[0]]
        crowd = peers if len(peers) >= MAX_PER_ADDRESS else others if len(others) >= MAX_CONNECTIONS else []
        waiting = [each for each in crowd if each.waits_for_client and self.since - each.since >= NEW_SECONDS]
        if crowd:
            min(waiting, key=lambda each: (each.answering, each.since), default=self).turn_away()

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

    def turn_away(self) -> None:
        """End it; with a response if there was none on it, as a request may be on the way."""
        if self.cycle is None:
            self.transport.write(TOO_MANY.encode())
            self.transport.close()
        else:
            self.transport.abort()

    @property
    def waits_for_client(self) -> bool:
        """Whether nothing happens until the client sends or reads more."""
        is_sending = self.cycle is not None and self.cycle.more_body and not self.flow.read_paused
        return not self.answering or is_sending or self.transport.get_write_buffer_size() > 0

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
        for each in sockets or []:
            each.listen(QUEUE)
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
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(
            f"cannot listen on {host}, port {port} ({reason}): try another --port, 0 for a free one"
        ) from error
    # Connections inherit it; asyncio sets it only on those that know their protocol number. Without it, the body of a
    # response waits 40 ms until the client has acknowledged the header.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def address(listening: socket.socket) -> str:
    """The URL of a socket that listens."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def report_error(loop: asyncio.AbstractEventLoop, context: dict) -> None:
    """Report an error of the event loop, unless clients cause it: asyncio logs each one with a traceback."""
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)
