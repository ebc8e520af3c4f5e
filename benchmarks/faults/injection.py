"""The faults, and how a command recovers: by following its own error message."""

import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.faults.processes import Command, Exit, run
from benchmarks.faults.workloads import Workload
from proxygml.files import LOCK_NAME

MAX_ATTEMPTS = 4  # commands after a fault, each following the message of the previous one


@dataclass
class Trial:
    """A command that meets a fault."""

    workload: Workload
    shared: Path
    folder: Path
    cpu_seconds: dict[bool, float]  # of the undisturbed command, by whether it runs in a fresh interpreter
    peak_bytes: int  # of the undisturbed command's folder
    expected: object  # result of the undisturbed command
    rng: random.Random
    exits: list[Exit] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was done, and what is wrong
    rebuilt: list[str] = field(default_factory=list)  # files that messages gave up, and that were made again

    def start(self, *, fresh: bool = False) -> Command:
        arguments = self.workload.arguments(self.shared, self.folder)
        return Command(arguments, self.folder, fresh=fresh or not self.workload.forks)

    def wait(self, command: Command) -> Exit:
        self.exits.append(command.wait())
        return self.exits[-1]

    def start_until_random_moment(self, last: float = 1.0, *, fresh: bool = False) -> Command:
        """Start the command and wait until a random moment in the last fraction of its CPU time."""
        command = self.start(fresh=fresh)
        seconds = self.cpu_seconds[fresh or not self.workload.forks]
        command.wait_for_cpu_seconds(seconds * self.rng.uniform(1 - last, 1))
        return command

    def kill(self, last: float = 1.0) -> None:
        """Kill the command at a random moment."""
        command = self.start_until_random_moment(last)
        command.signal(signal.SIGKILL)
        self.wait(command)
        self.wait_for_other_processes(command)

    def wait_for_other_processes(self, command: Command) -> None:
        if self.workload.name == "train-sharded":  # the second process ends only after it misses the first
            command.wait_for_group()


def send_signal(number: int, *, group: bool = False) -> Callable[[Trial], None]:
    def inject(trial: Trial) -> None:
        command = trial.start_until_random_moment(fresh=True in trial.cpu_seconds)  # possibly during imports
        command.signal(number, group=group)
        trial.wait(command)
        trial.wait_for_other_processes(command)

    return inject


def fill_disk(trial: Trial) -> None:
    """Run on a tmpfs that is too small for a random part of the output."""
    used = folder_bytes(trial.folder)
    size = used + trial.rng.randrange(4096, max(8192, trial.peak_bytes - used))
    with tempfile.TemporaryDirectory() as copy:
        shutil.copytree(trial.folder, copy, dirs_exist_ok=True)
        mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", trial.folder)
        shutil.copytree(copy, trial.folder, dirs_exist_ok=True)
    trial.notes.append(f"disk of {size:,} bytes")
    trial.wait(trial.start())


def make_read_only(trial: Trial) -> None:
    """Make the folder of a killed command read-only and run it again."""
    mount("--bind", trial.folder, trial.folder)
    trial.kill()
    mount("-o", "remount,bind,ro", trial.folder)
    trial.wait(trial.start())


def damage(alter: Callable[[Trial, Path], None]) -> Callable[[Trial], None]:
    """Alter a file of a command that was killed late or has ended."""

    def inject(trial: Trial) -> None:
        trial.kill(last=0.6)
        patterns = trial.workload.damageable.split()
        while not (files := sorted(path for pattern in patterns for path in trial.folder.glob(pattern))):
            trial.wait(trial.start())
        path = trial.rng.choice([file for file in files if file.stat().st_size])
        alter(trial, path)
        trial.notes.append(f"in {path.relative_to(trial.folder)}")
        trial.wait(trial.start())

    return inject


def truncate(trial: Trial, path: Path) -> None:
    trial.notes.append("truncated")
    os.truncate(path, trial.rng.randrange(path.stat().st_size))


def flip_bits(trial: Trial, path: Path) -> None:
    """Flip one to eight bits."""
    content = bytearray(path.read_bytes())
    for _ in range(trial.rng.randint(1, 8)):
        position = trial.rng.randrange(len(content))
        content[position] ^= 1 << trial.rng.randrange(8)
        trial.notes.append(f"byte {position:,}")
    path.write_bytes(content)


def kill_worker(trial: Trial) -> None:
    """Kill a process that decodes images, shares the batches or executes a run."""
    command = trial.start_until_random_moment()
    while not command.children() and not command.ends_within(0.01):
        pass
    for child in trial.rng.sample(command.children(), min(1, len(command.children()))):
        trial.notes.append("killed a worker")
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            trial.notes.append("it had ended")
    trial.wait(command)
    trial.wait_for_other_processes(command)


def start_two(trial: Trial) -> None:
    """Start the same command twice: the second must be refused by name unless the first is about to end."""
    commands = [trial.start_until_random_moment(), trial.start()]
    for command, other in (commands[::-1], commands):
        ended = trial.wait(command)
        if ended.code == 1:
            trial.notes.append("one was refused")
            if not re.search(rf"process {other.pid} on |is not empty|is there already|already exists", ended.message):
                trial.notes.append(f"wrong: the message does not name the other command: {ended.message}")


def leave_lock(trial: Trial) -> None:
    """Leave the lock file of a killed command, with the id of another running process."""
    trial.kill()
    for lock in trial.folder.rglob(LOCK_NAME):
        lock.write_text(f"process {os.getpid()} on this machine")
        trial.notes.append("left a lock")
    trial.wait(trial.start())


INJECTED: dict[str, Callable[[Trial], None]] = {
    "kill": send_signal(signal.SIGKILL),
    "Ctrl-C": send_signal(signal.SIGINT, group=True),
    "SIGTERM": send_signal(signal.SIGTERM),
    "full disk": fill_disk,
    "read-only": make_read_only,
    "truncated file": damage(truncate),
    "flipped bits": damage(flip_bits),
    "worker killed": kill_worker,
    "two commands": start_two,
    "stale lock": leave_lock,
}


def recover(trial: Trial) -> bool:
    """Follow the messages and repeat the command until it succeeds; whether the result is the expected one."""
    trial.rebuilt += [line for ended in trial.exits for line in ended.lines if "starting the run again" in line]
    for _ in range(MAX_ATTEMPTS):
        follow(trial, trial.exits[-1].message)
        if trial.wait(trial.start()).code == 0:
            break
    else:
        trial.notes.append(f"wrong: it fails after {MAX_ATTEMPTS} attempts")
    try:
        return trial.workload.result(trial.folder) == trial.expected
    except (OSError, ValueError) as error:
        trial.notes.append(f"wrong: {error}")
        return False


def follow(trial: Trial, message: str) -> None:
    """Do what an error message asks for."""
    mounts = mounts_on(trial.folder)
    if mounts and re.search("No space|disk is full|MB left|[Rr]ead-?only|cannot be", message):
        mount("-o", "remount,size=1g" if mounts[-1] == "tmpfs" else "remount,bind,rw", trial.folder)
    given_up = re.findall(r"(?:remove|and) (\S*/\S+?)(?=,? |$)", message)
    given_up += re.findall(r"(\S+) is (?:a link|a pipe|damaged .* move it away)", message)
    given_up += re.findall(r"(\S+) (?:does not contain embeddings|exists already: name a new folder)", message)
    for path in (trial.folder / name for name in given_up):
        if path.exists() and not path.is_symlink() and path.name != LOCK_NAME:
            trial.rebuilt.append(str(path.relative_to(trial.folder)))
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if any(path.endswith("own.npz") for path in given_up):
        trial.workload.prepare(trial.shared, trial.folder)
    resume = re.search(r"proxygml train --resume (\S+)", message)
    if resume and not trial.workload.name.startswith("train"):
        trial.exits.append(run(["train", "--resume", resume[1].rstrip(".:")], trial.folder))


def mount(*arguments: object) -> None:
    """Run `mount`; it is retried, because a killed process may still have a file open."""
    for _ in range(50):
        done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True)
        if done.returncode == 0:
            return
        time.sleep(0.2)
    raise OSError(f"mount {arguments}: {done.stderr}")


def mounts_on(folder: Path) -> list[str]:
    """Types of the file systems mounted on a folder, the topmost last."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [file_system for _, target, file_system, *_ in mounts if target == str(folder)]


def folder_bytes(folder: Path) -> int:
    """Size of all files in whole pages, as on a tmpfs."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += -(-path.lstat().st_size // 4096) * 4096
        except FileNotFoundError:  # deleted in the meantime
            continue
    return total
