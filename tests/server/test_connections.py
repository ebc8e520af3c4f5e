"""Idle, slow and too many connections."""

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import uvicorn
from fastapi import FastAPI
from uvicorn.server import ServerState

from proxygml.server import connections
from proxygml.server.connections import TOO_MANY, Connection, Server, listen, report_error

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
Connect = Callable[..., Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]


async def app(scope: dict, receive: Callable, send: Callable) -> None:
    """Answers with "yes" once the whole request has arrived."""
    while (await receive()).get("more_body"):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"3")]})
    await send({"type": "http.response.body", "body": b"yes"})


@asynccontextmanager
async def serving() -> AsyncIterator[Connect]:
    """Yields a function that connects from an address of this machine."""
    config, state = uvicorn.Config(app, lifespan="off", log_level="error"), ServerState()
    config.load()
    loop, writers = asyncio.get_running_loop(), []
    server = await loop.create_server(
        lambda: Connection(config, state, {}), "127.0.0.1", 0, backlog=connections.BACKLOG
    )

    async def connect(address: str = "127.0.0.1") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), local_addr=(address, 0))
        writers.append(writer)
        return reader, writer

    yield connect
    server.close()
    for each in [*writers, *state.connections]:
        each.transport.abort()
    await asyncio.sleep(0.01)


async def ask(stream: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bytes:
    stream[1].write(REQUEST)
    await asyncio.wait_for(stream[0].readuntil(b"\r\n\r\n"), 10)
    return await asyncio.wait_for(stream[0].readexactly(3), 10)


async def has_ended(stream: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> bool:
    try:
        return TOO_MANY.startswith((await asyncio.wait_for(stream[0].read(), 0.05)).decode())
    except ConnectionResetError:
        return True
    except asyncio.TimeoutError:
        return False


@pytest.mark.parametrize(
    "sent",
    [b"", REQUEST[:20], REQUEST + REQUEST[:20], b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 999\r\n\r\nx"],
    ids=["idle", "half a header", "half a second header", "no body"],
)
def test_slow_connections_end(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.3)

    async def drip(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(b"x")
            await asyncio.sleep(0.02)

    async def wait() -> float:
        async with serving() as connect:
            reader, writer = await connect()
            start = time.monotonic()
            writer.write(sent)
            dripping = asyncio.create_task(drip(writer)) if sent else None
            with suppress(ConnectionResetError):
                await asyncio.wait_for(reader.read(), 10)
            if dripping:
                dripping.cancel()
            return time.monotonic() - start

    assert 0.2 < asyncio.run(wait()) < 2


def test_idle_connections_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "NEW_SECONDS", 0)

    async def crowd() -> None:
        async with serving() as connect:
            mine = await connect()
            assert await ask(mine) == b"yes"
            idle = [await connect("127.0.0.2") for _ in range(2 * connections.MAX_CONNECTIONS)]
            assert [await has_ended(each) for each in (idle[0], idle[-connections.MAX_PER_ADDRESS])] == [True, False]
            assert await ask(mine) == b"yes"  # of another address
            assert await ask(await connect("127.0.0.2")) == b"yes"

    asyncio.run(crowd())


def test_many_addresses_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "NEW_SECONDS", 0)

    async def crowd() -> None:
        async with serving() as connect:
            idle = [await connect(f"127.0.0.{2 + i // 10}") for i in range(connections.MAX_CONNECTIONS + 20)]
            assert [await has_ended(each) for each in (idle[0], idle[19], idle[20])] == [True, True, False]
            assert await ask(await connect()) == b"yes"

    asyncio.run(crowd())


def test_idle_connections_end_before_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "NEW_SECONDS", 0)

    async def crowd() -> None:
        async with serving() as connect:
            reader, writer = uploading = await connect()
            writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\n")
            await asyncio.sleep(0.05)
            idle = [await connect() for _ in range(2 * connections.MAX_PER_ADDRESS)]
            assert await has_ended(idle[0])
            assert not await has_ended(uploading)
            writer.write(b"end")
            assert (await asyncio.wait_for(reader.readuntil(b"yes"), 10)).startswith(b"HTTP/1.1 200")

    asyncio.run(crowd())


def test_slow_requests_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "NEW_SECONDS", 0)

    async def crowd() -> None:
        async with serving() as connect:
            slow = [await connect() for _ in range(connections.MAX_PER_ADDRESS)]
            for _, writer in slow:
                writer.write(b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nx")
            await asyncio.sleep(0.05)
            assert await ask(await connect()) == b"yes"
            assert [await has_ended(each) for each in slow[:2]] == [True, False]

    asyncio.run(crowd())


def test_thousand_requests_at_once_are_all_answered() -> None:
    app, ready, go = FastAPI(), threading.Event(), threading.Event()
    app.get("/")(lambda: go.wait(30))

    async def request(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            writer.write(REQUEST)
            header = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(header.lower().split(b"content-length: ")[1].split()[0]))
            return header.split()[1]
        finally:
            writer.close()

    async def crowd(port: int) -> list[bytes | BaseException]:
        requests = [asyncio.create_task(request(port)) for _ in range(1000)]
        await asyncio.wait(requests, timeout=30, return_when=asyncio.FIRST_COMPLETED)  # one too many
        go.set()
        return await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 60)

    with connections.listen("127.0.0.1", 0) as listening:
        server = Server(app, ready.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        assert ready.wait(10)
        try:
            answers = asyncio.run(crowd(listening.getsockname()[1]))
        finally:
            server.should_exit = True
            thread.join()
    assert {answer for answer in answers if not isinstance(answer, bytes)} == set()
    assert answers.count(b"200") + answers.count(b"503") == 1000
    assert answers.count(b"200") >= connections.MAX_PER_ADDRESS
    assert answers.count(b"503") > 0


def test_errors_that_clients_cause_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    report_error(loop, {"message": "socket.accept() out of system resource", "exception": OSError(24, "Too many")})
    assert caplog.text == ""
    report_error(loop, {"message": "a mistake of ours", "exception": KeyError("x")})
    assert "a mistake of ours" in caplog.text
    loop.close()


def test_responses_do_not_wait_for_acknowledgements() -> None:
    with listen("127.0.0.1", 0) as listening, socket.create_connection(listening.getsockname()):
        connection, _ = listening.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
