"""Background jobs: each runs in a thread at most once, reports its progress, and can be canceled."""

import threading
from collections.abc import Callable
from typing import Any

from proxygml.files import one_line

Report = Callable[[int, int], None]  # (done, total); raises CanceledError to end the work


class CanceledError(Exception):
    """The job was canceled."""


class NotReadyError(Exception):
    """The job has no result yet."""


class Job:
    """Runs `work(report)` in a thread and keeps its result."""

    def __init__(self, work: Callable[[Report], Any]) -> None:
        self._work, self._lock, self._cancel = work, threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None
        self._result: Any = None
        self.state, self.done, self.total, self.error = "idle", 0, 0, ""

    def start(self) -> None:
        """Start, unless it is running or done."""
        with self._lock:
            if self.state in ("running", "done"):
                return
            if self._thread is not None:
                self._thread.join()  # it was canceled and is about to end
            self._cancel.clear()
            self.state, self.done, self.total, self.error = "running", 0, 0, ""
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def cancel(self) -> None:
        """End it at its next report, if it is running."""
        with self._lock:
            if self.state == "running":
                self._cancel.set()
                self.state = "idle"

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended, at most so many seconds."""
        if self._thread is not None:
            self._thread.join(seconds)

    def status(self) -> dict[str, str | int]:
        return {"state": self.state, "done": self.done, "total": self.total, "error": self.error}

    @property
    def result(self) -> Any:
        """What `work` returned; NotReadyError until it is done."""
        if self.state != "done":
            raise NotReadyError("not computed yet: start the job or wait until it is done")
        return self._result

    def _report(self, done: int, total: int) -> None:
        if self._cancel.is_set():
            raise CanceledError
        self.done, self.total = done, total

    def _run(self) -> None:
        result, state, error = None, "done", ""
        try:
            result = self._work(self._report)
        except CanceledError:
            return
        except Exception as raised:  # the page shows any error and works on
            state, error = "failed", one_line(raised)
        with self._lock:
            if not self._cancel.is_set():
                self._result, self.error, self.state = result, error, state
