"""What a stopped command prints: how to continue."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from proxygml.files import UnwritableError


@contextmanager
def resume_hint(hint: Callable[[], str]) -> Iterator[None]:
    """Add how to continue to the message of Ctrl-C, a full disk or a lost process; `hint` may return an empty text."""
    try:
        yield
    except BaseException as error:
        if KeyboardInterrupt in (type(error), type(error.__cause__)):  # an import may wrap it in another error
            raise KeyboardInterrupt(*filter(None, [hint()])) from None
        from proxygml.data.loading import WorkerKilledError, is_worker_killed

        stop = WorkerKilledError() if is_worker_killed(error) else error
        if isinstance(stop, (UnwritableError, WorkerKilledError)):
            text = hint()
            raise type(stop)(f"{stop}. When that is fixed, {text}" if text else str(stop)) from error
        raise
