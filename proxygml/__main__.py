"""The command `proxygml`, also as `python -m proxygml`; SIGTERM ends it like Ctrl-C."""

import os
import signal
import sys
from typing import TYPE_CHECKING

from proxygml.distributed.launch import is_first_process

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType


def main() -> None:
    """Run a command; a signal at any time ends it with one line."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # closed by the caller: the next file would take its number
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115
    _handle_signals(_exit)  # during imports, an exception could be swallowed or printed as a traceback
    from proxygml.cli.main import main as run_command

    _handle_signals(signal.default_int_handler)
    try:
        run_command()
    finally:
        _handle_signals(signal.SIG_IGN)


def _handle_signals(handler: "Callable[[int, FrameType | None], object] | signal.Handlers") -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _exit(*_: object) -> None:
    if is_first_process():
        os.write(2, b"stopped\n")
    os._exit(130)


if __name__ == "__main__":
    main()
