"""What a command that is stopped says: how to go on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from proxygml.data.loading import WorkerKilledError, is_worker_killed
from proxygml.files import UnwritableError


@contextmanager
def told_to_go_on(how: Callable[[], str]) -> Iterator[None]:
    """Whom Ctrl-C, a disk or a lost process stops inside is told how to go on, in the line that the command ends with.

    `how` is asked then; it may have nothing to say.
    """
    try:
        yield
    except BaseException as error:
        if KeyboardInterrupt in (type(error), type(error.__cause__)):  # which an import may turn into another error
            raise KeyboardInterrupt(*filter(None, [how()])) from None
        stop = WorkerKilledError() if is_worker_killed(error) else error
        if isinstance(stop, (UnwritableError, WorkerKilledError)):
            told = how()
            raise type(stop)(f"{stop}. When that is mended, {told}" if told else str(stop)) from error
        raise
