"""The program: `python -m proxygml` is the command `proxygml`, and SIGTERM ends it as Ctrl-C does."""

import os
import signal
from typing import TYPE_CHECKING

from proxygml.distributed.launch import is_first_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def main() -> None:
    """Run a command; signals end it where that can be said in a line, from its first moment to its last."""
    _answer(_end_at_once)  # an exception in the midst of an import may get lost, or be told in pages
    from proxygml.cli.main import main as run_command

    _answer(signal.default_int_handler)
    try:
        run_command()
    finally:
        _answer(signal.SIG_IGN)  # all is done and said


def _answer(handler: "Callable[[int, FrameType | None], object] | signal.Handlers") -> None:
    for number in SIGNALS:
        signal.signal(number, handler)


def _end_at_once(*_: object) -> None:
    if is_first_process():
        os.write(2, b"stopped\n")
    os._exit(130)


if __name__ == "__main__":
    main()
