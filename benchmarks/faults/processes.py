"""Commands as processes that can be interrupted, and a check of their error messages."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT = 900  # seconds until a command counts as hanging, on a loaded machine
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload([f"proxygml.{name}" for name in ("cli", "training", "model", "plots")])


@dataclass(frozen=True)
class Exit:
    """Exit code and stderr of a command."""

    code: int
    lines: list[str]

    @property
    def message(self) -> str:
        """The last error message, or ""."""
        return next((line for line in reversed(self.lines) if line.startswith(("error: ", "stopped"))), "")

    def problems(self) -> list[str]:
        """Tracebacks, unexpected exit codes, and anything but exactly one message for a failure."""
        problems = [line for line in self.lines if re.match(r"Traceback|Exception ignored|  File ", line)]
        messages = [line for line in self.lines if line.startswith(("error: ", "stopped"))]
        prefixes = {0: None, 1: "error: ", 130: "stopped", -signal.SIGKILL: None, -signal.SIGPIPE: None}
        if not self.lines:  # the signal arrived before Python had started the command
            prefixes |= {-signal.SIGTERM: None}
        if self.code not in prefixes:
            problems.append(f"exit code {self.code}")
        elif prefixes[self.code] and not (len(messages) == 1 and messages[0].startswith(prefixes[self.code])):
            problems.append(f"exit code {self.code} with messages {messages}")
        return problems


class Command:
    """A running command in its own session.

    It runs in a new interpreter (`fresh`), or in a fork of a process that has already imported everything.
    """

    def __init__(self, arguments: list[object], folder: Path, *, fresh: bool, **options: Any) -> None:
        self.stderr = folder.parent / f"{folder.name}-{time.monotonic_ns()}.stderr"
        start = _start_fresh if fresh else _ForkedProcess
        self.process = start([str(argument) for argument in arguments], folder, self.stderr, **options)
        self.pid = self.process.pid

    def ends_within(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the process, or like a terminal to its whole group. It may have ended."""
        if self.process.poll() is None:
            os.killpg(self.pid, number) if group else os.kill(self.pid, number)

    def cpu_seconds(self) -> float:
        """CPU time of the command and its children so far; independent of other load on the machine."""
        ticks = 0
        for pid in (self.pid, *self.children()):
            after_name = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
            ticks += sum(map(int, after_name[11:15]))  # own time and that of children that have ended
        return ticks / CLOCK_TICKS

    def wait_for_cpu_seconds(self, seconds: float) -> None:
        """Wait until the command has used this CPU time, or has ended."""
        while self.cpu_seconds() < seconds and not self.ends_within(0.01):
            pass

    def children(self) -> list[int]:
        """Process ids of its worker processes."""
        pids = []
        for pid in _read(Path(f"/proc/{self.pid}/task/{self.pid}/children")).split():
            command = _read(Path(f"/proc/{pid}/cmdline"))
            if "python" in command and "resource_tracker" not in command:
                pids.append(int(pid))
        return pids

    def wait(self) -> Exit:
        """Wait for the end of the command; kill it with its children if it hangs."""
        hangs = not self.ends_within(TIMEOUT)
        if hangs:
            os.killpg(self.pid, 9)
            self.process.wait()
        lines = self.stderr.read_text(errors="replace").splitlines()
        return Exit(-1, [*lines, f"timeout after {TIMEOUT} s"]) if hangs else Exit(self.process.returncode, lines)

    def wait_for_group(self) -> None:
        """Wait until all of its processes have ended."""
        deadline = time.monotonic() + TIMEOUT
        while time.monotonic() < deadline:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def run(arguments: list[object], folder: Path) -> Exit:
    return Command(arguments, folder, fresh=False).wait()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process has ended
        return ""


def _start_fresh(arguments: list[str], folder: Path, stderr: Path, **options: Any) -> subprocess.Popen:
    command = [sys.executable, "-m", "proxygml", *arguments]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL} | options
    with stderr.open("wb") as file:
        return subprocess.Popen(command, cwd=folder, stderr=file, start_new_session=True, **streams)


class _ForkedProcess:
    """A fork with the parts of Popen's interface that Command uses."""

    def __init__(self, arguments: list[str], folder: Path, stderr: Path) -> None:
        self._process = FORKSERVER.Process(target=_run_in_fork, args=(arguments, folder, stderr))
        self._process.start()
        self.pid = self._process.pid
        while not stderr.exists() and self._process.exitcode is None:
            time.sleep(0.01)

    def wait(self, seconds: float | None = None) -> None:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("proxygml", seconds)

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)


def _run_in_fork(arguments: list[str], folder: Path, stderr: Path) -> None:
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    sys.argv = ["proxygml-in-a-fork", *arguments]
    multiprocessing.set_start_method("fork", force=True)  # the default, for its own children
    from proxygml.__main__ import main

    os.dup2(os.open(stderr, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666), 2)
    main()
