"""Queries that share a batch."""

import asyncio
import threading

import pytest

from proxygml.server.batching import Batcher


class Squares:
    """Squares of numbers; knows its batches. A first batch waits until `go`; negative numbers are errors."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = threading.Event()

    def __call__(self, numbers: list[int]) -> list[int]:
        self.batches.append(numbers)
        assert self.go.wait(10)
        if min(numbers) < 0:
            raise ValueError(f"{min(numbers)} is negative")
        return [number**2 for number in numbers]


def answers(numbers: list[int], *, max_batch: int = 100, cancel: tuple[int, ...] = ()) -> tuple[list, list[list[int]]]:
    """What each of the numbers gets, asked at the same time while another one is being answered, and the batches."""
    squares = Squares()

    async def ask() -> list:
        batcher = Batcher(squares, max_batch)
        first = asyncio.create_task(batcher(0))
        while not squares.batches:
            await asyncio.sleep(0.001)
        tasks = [asyncio.create_task(batcher(number)) for number in numbers]
        await asyncio.sleep(0)
        for place in cancel:
            tasks[place].cancel()
        squares.go.set()
        assert await first == 0
        return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(ask()), squares.batches[1:]


def test_waiting_queries_share_a_batch() -> None:
    assert answers([1, 2, 3]) == ([1, 4, 9], [[1, 2, 3]])


def test_batches_are_limited() -> None:
    assert answers([1, 2, 3, 4, 5], max_batch=2) == ([1, 4, 9, 16, 25], [[1, 2], [3, 4], [5]])


def test_error_of_a_query_is_not_that_of_others() -> None:
    (one, error, three), batches = answers([1, -2, 3])
    assert (one, three) == (1, 9)
    assert isinstance(error, ValueError)
    assert batches == [[1, -2, 3], [1], [-2], [3]]


@pytest.mark.parametrize("cancel", [(1,), (0, 1, 2)])
def test_canceled_queries_are_not_answered(cancel: tuple[int, ...]) -> None:
    results, batches = answers([1, 2, 3], cancel=cancel)
    assert [isinstance(result, asyncio.CancelledError) for result in results] == [i in cancel for i in range(3)]
    assert batches == ([[1, 3]] if cancel == (1,) else [])
