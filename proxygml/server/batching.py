"""Answers concurrent requests together: while one batch is computed, the next one gathers."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from fastapi.concurrency import run_in_threadpool

Query = TypeVar("Query")
Answer = TypeVar("Answer")


class Batcher(Generic[Query, Answer]):
    """`await batcher(query)` is the answer to a query; `answer_all` gets those that wait, in a thread, in order.

    A query that is alone does not wait. If `answer_all` fails, it gets each query alone: no other one fails with it.
    """

    def __init__(self, answer_all: Callable[[list[Query]], Sequence[Answer]], max_batch: int) -> None:
        self._answer_all, self._max_batch = answer_all, max_batch
        self._waiting: deque[tuple[Query, asyncio.Future[Answer]]] = deque()
        self._task: asyncio.Task | None = None

    async def __call__(self, query: Query) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((query, future))
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        try:
            while self._waiting:
                size = min(len(self._waiting), self._max_batch)
                await self._answer([self._waiting.popleft() for _ in range(size)])
        finally:
            self._task = None

    async def _answer(self, batch: list[tuple[Query, asyncio.Future[Answer]]]) -> None:
        batch = [(query, future) for query, future in batch if not future.done()]  # canceled: nobody waits
        if not batch:
            return
        try:
            answers = await run_in_threadpool(self._answer_all, [query for query, _ in batch])
        except Exception as error:
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            for each in batch:
                await self._answer([each])
            return
        for (_, future), answer in zip(batch, answers, strict=True):
            if not future.done():
                future.set_result(answer)
