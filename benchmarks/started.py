"""Commands as processes that can be disturbed, and whether they say in a line how they ended."""

import multiprocessing
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

LIMIT = 1800  # seconds after which a command counts as hanging, on however loaded a machine
TICKS = os.sysconf("SC_CLK_TCK")
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([f"proxygml.{room}" for room in ("cli", "training", "galleries", "pictures")])


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it said on stderr."""

    code: int
    lines: list[str]

    @property
    def line(self) -> str:
        """Its last word, where it failed."""
        return next((line for line in reversed(self.lines) if line.startswith(("error: ", "stopped"))), "")

    def unclear(self) -> list[str]:
        """What is wrong with how it ended: an end or a refusal is said in one line, and nothing in pages."""
        wrong = [line for line in self.lines if re.match(r"Traceback|Exception ignored|  File ", line)]
        ends = [line for line in self.lines if line.startswith(("error: ", "stopped"))]
        wanted = {0: None, 1: "error: ", 130: "stopped", -9: None}
        if self.code not in wanted:
            wrong.append(f"it ended with {self.code}")
        elif wanted[self.code] and not (len(ends) == 1 and ends[0].startswith(wanted[self.code])):
            wrong.append(f"it ended with {self.code} and said {ends}")
        return wrong


class Command:
    """A command under way, in a session of its own as in a terminal of its own.

    It is started `anew`, as a person does, or as a fork of a process that has imported everything already.
    """

    def __init__(self, words: list[object], folder: Path, *, anew: bool) -> None:
        self.said = folder.parent / f"{folder.name}-{time.monotonic_ns()}.stderr"
        words = [str(word) for word in words]
        self.process = (_anew if anew else _Forked)(words, folder, self.said)
        self.pid = self.process.pid

    def ends_within(self, seconds: float) -> bool:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return False
        return True

    def signal(self, number: int, everywhere: bool = False) -> None:
        """To the process, or as a terminal does to all of its processes; it may have ended."""
        if self.process.poll() is None:
            os.killpg(self.pid, number) if everywhere else os.kill(self.pid, number)

    def seconds(self) -> float:
        """Of computing so far, by it and its processes: moments in it do not depend on what else the machine does."""
        ticks = 0
        for pid in (self.pid, *self.children()):
            after_name = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
            ticks += sum(map(int, after_name[11:15]))  # its own and those of children that have ended
        return ticks / TICKS

    def computes(self, seconds: float) -> bool:
        """Wait until it has computed for so long; whether it came so far."""
        while self.seconds() < seconds:
            if self.ends_within(0.01):
                return False
        return True

    def children(self) -> list[int]:
        """Its processes that do a part of its work."""
        found = []
        for pid in _read(Path(f"/proc/{self.pid}/task/{self.pid}/children")).split():
            command = _read(Path(f"/proc/{pid}/cmdline"))
            if "python" in command and "resource_tracker" not in command:
                found.append(int(pid))
        return found

    def end(self) -> Ended:
        """Wait for it; one that hangs is killed with all of its processes, which shows as an end by itself."""
        if not self.ends_within(LIMIT):
            os.killpg(self.pid, 9)
            self.process.wait()
            return Ended(-1, [*self.said.read_text(errors="replace").splitlines(), f"it hung for {LIMIT} s"])
        return Ended(self.process.returncode, self.said.read_text(errors="replace").splitlines())

    def alone(self) -> None:
        """Wait until its processes have ended too."""
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            try:
                os.killpg(self.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.1)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended
        return ""


def run(words: list[object], folder: Path) -> Ended:
    return Command(words, folder, anew=False).end()


def _anew(words: list[str], folder: Path, said: Path) -> subprocess.Popen:
    with said.open("wb") as stderr:
        return subprocess.Popen(
            [sys.executable, "-m", "proxygml", *words],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )


class _Forked:
    """A fork, with what is needed of a Popen."""

    def __init__(self, words: list[str], folder: Path, said: Path) -> None:
        self._process = FORKS.Process(target=_run_here, args=(words, folder, said))
        self._process.start()
        self.pid = self._process.pid
        while not said.exists() and self._process.exitcode is None:
            time.sleep(0.01)

    def wait(self, seconds: float | None = None) -> None:
        self._process.join(seconds)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("proxygml", seconds)

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)


def _run_here(words: list[str], folder: Path, said: Path) -> None:
    os.setsid()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    sys.argv = ["proxygml-in-a-fork", *words]
    multiprocessing.set_start_method("fork", force=True)  # of its own processes, as by default
    from proxygml.__main__ import main

    os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o666), 2)
    main()
