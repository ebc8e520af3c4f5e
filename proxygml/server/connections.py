"""Connections to the server: time-outs and limits that uvicorn lacks, so that nobody keeps others out."""

import asyncio

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
