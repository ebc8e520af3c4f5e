"""Work that goes on while the page is used: begun once, told how far it is, ended when nobody wants it any more."""

import threading
from collections.abc import Callable
from typing import Any

Report = Callable[[int, int], None]  # done, of how many; it raises where the work is to end


class CanceledError(Exception):
    """Nobody wants the result any more."""


class Job:
    """`work(report)` in a thread, at most once at a time; `result` is what it gave, and stays."""

    def __init__(self, work: Callable[[Report], Any]) -> None:
        self._work, self._lock, self._cancel = work, threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self.state, self.done, self.total, self.error = "idle", 0, 0, ""
        self.result: Any = None

    def start(self) -> None:
        """Begin, unless it is under way or done."""
        with self._lock:
            if self.state in ("running", "done"):
                return
            if self._thread is not None:
                self._thread.join()  # it was canceled and is about to end
            self._cancel.clear()
            self.state, self.done, self.total, self.error = "running", 0, 0, ""
            self._thread = threading.Thread(target=self._run, daemon=True)  # it never keeps the program from ending
            self._thread.start()

    def cancel(self) -> None:
        """End it at its next report; what is done stays."""
        with self._lock:
            if self.state == "running":
                self._cancel.set()
                self.state = "idle"

    def wait(self, seconds: float | None = None) -> None:
        """Until it has ended, if it was begun, at most so long."""
        if self._thread is not None:
            self._thread.join(seconds)

    def told(self) -> dict[str, str | int]:
        """How far it is, for the page."""
        return {"state": self.state, "done": self.done, "total": self.total, "error": self.error}

    def _report(self, done: int, total: int) -> None:
        if self._cancel.is_set():
            raise CanceledError
        self.done, self.total = done, total

    def _run(self) -> None:
        result, state, reason = None, "done", ""
        try:
            result = self._work(self._report)
        except CanceledError:
            return
        except Exception as error:  # whatever it is, the page says so and goes on
            state, reason = "failed", " ".join(str(error).split()) or type(error).__name__
        with self._lock:
            if not self._cancel.is_set():
                self.result, self.error, self.state = result, reason, state
