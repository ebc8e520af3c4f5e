"""What benchmarks.faults does to a command and its files, and how the command goes on: by doing what its line says."""

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

from benchmarks.started import Command, Ended, run
from benchmarks.victims import Victim
from proxygml.locks import NAME as LOCK

ATTEMPTS = 4  # commands after a fault, each doing what the one before it said


@dataclass
class Trial:
    """A command on its way through a fault."""

    victim: Victim
    ground: Path
    folder: Path
    seconds: dict[bool, float]  # that the command computes undisturbed, started anew and not
    peak: int  # bytes that its folder then holds at most
    expected: object  # what it then ends with
    random: random.Random
    ends: list[Ended] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what was done to it, and what is wrong

    def start(self, anew: bool = False) -> Command:
        words = self.victim.words(self.ground, self.folder)
        return Command(words, self.folder, anew=anew or not self.victim.forks)

    def ended(self, command: Command) -> Ended:
        """Wait for it; what is unclear about its end is kept."""
        self.ends.append(command.end())
        return self.ends[-1]

    def start_and_wait(self, share: float = 1.0, anew: bool = False) -> Command:
        """The command, up to a random moment of its time, or of the last share of it."""
        command = self.start(anew)
        command.computes(self.seconds[anew or not self.victim.forks] * self.random.uniform(1 - share, 1))
        return command

    def kill(self, share: float = 1.0) -> None:
        """Stop the command as a crash does, somewhere on its way."""
        command = self.start_and_wait(share)
        command.signal(signal.SIGKILL)
        self.ended(command)
        if self.victim.name == "train-shared":  # the other one first has to miss the first
            command.alone()


def by_signal(number: int, everywhere: bool = False) -> Callable[[Trial], None]:
    def disturb(trial: Trial) -> None:
        command = trial.start_and_wait(anew=True in trial.seconds)  # also while it still imports
        command.signal(number, everywhere)
        trial.ended(command)
        if trial.victim.name == "train-shared":
            command.alone()

    return disturb


def fill_disk(trial: Trial) -> None:
    """A disk with room for a random part of what the command writes."""
    used = size_of(trial.folder)
    room = used + trial.random.randrange(4096, max(8192, trial.peak - used))
    with tempfile.TemporaryDirectory() as aside:
        shutil.copytree(trial.folder, aside, dirs_exist_ok=True)
        mount("-t", "tmpfs", "-o", f"size={room}", "tmpfs", trial.folder)
        shutil.copytree(aside, trial.folder, dirs_exist_ok=True)
    trial.notes.append(f"room for {room:,} bytes")
    trial.ended(trial.start())


def make_read_only(trial: Trial) -> None:
    """A folder that can no longer be written when a command that was killed goes on."""
    mount("--bind", trial.folder, trial.folder)
    trial.kill()
    mount("-o", "remount,bind,ro", trial.folder)
    trial.ended(trial.start())


def damage(how: Callable[[Trial, bytearray], bytearray]) -> Callable[[Trial], None]:
    """A file of a command that was killed late, or that has ended, is altered."""

    def disturb(trial: Trial) -> None:
        trial.kill(share=0.6)
        patterns = trial.victim.damageable.split()
        while not (files := sorted(path for pattern in patterns for path in trial.folder.glob(pattern))):
            trial.ended(trial.start())
        path = trial.random.choice([one for one in files if one.stat().st_size])
        path.write_bytes(how(trial, bytearray(path.read_bytes())))
        trial.notes.append(f"in {path.relative_to(trial.folder)}")
        trial.ended(trial.start())

    return disturb


def cut(trial: Trial, content: bytearray) -> bytearray:
    trial.notes.append("cut")
    return content[: trial.random.randrange(len(content))]


def flip(trial: Trial, content: bytearray) -> bytearray:
    """One to eight bits, anywhere."""
    for _ in range(trial.random.randint(1, 8)):
        place = trial.random.randrange(len(content))
        content[place] ^= 1 << trial.random.randrange(8)
        trial.notes.append(f"byte {place:,}")
    return content


def kill_helper(trial: Trial) -> None:
    """A process that works for the command: one that decodes images, shares its batches or makes a run."""
    command = trial.start_and_wait()
    while not command.children() and not command.ends_within(0.01):
        pass
    for child in trial.random.sample(command.children(), min(1, len(command.children()))):
        trial.notes.append("killed one")
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            trial.notes.append("which had ended")
    trial.ended(command)
    if trial.victim.name == "train-shared":
        command.alone()


def start_two(trial: Trial) -> None:
    """The same command a second time: who comes late is refused and told by whom, unless the other is about to end."""
    both = [trial.start_and_wait(), trial.start()]
    for command, other in (both[::-1], both):
        ended = trial.ended(command)
        if ended.code == 1:
            trial.notes.append("one was refused")
            if not re.search(rf"process {other.pid} on |is not empty|is there already", ended.line):
                trial.notes.append(f"wrong: the other is not named in {ended.line}")


def fake_lock(trial: Trial) -> None:
    """The lock of a process that was killed, whose number another process has by now."""
    trial.kill()
    for lock in trial.folder.rglob(LOCK):
        lock.write_text(f"process {os.getpid()} on this machine")
        trial.notes.append("a lock was left")
    trial.ended(trial.start())


FAULTS: dict[str, Callable[[Trial], None]] = {
    "kill": by_signal(signal.SIGKILL),
    "Ctrl-C": by_signal(signal.SIGINT, everywhere=True),
    "SIGTERM": by_signal(signal.SIGTERM),
    "full disk": fill_disk,
    "read-only": make_read_only,
    "cut file": damage(cut),
    "flipped bits": damage(flip),
    "helper killed": kill_helper,
    "two at once": start_two,
    "stale lock": fake_lock,
}


def follow(trial: Trial, line: str) -> None:
    """Do what the last line of a command says."""
    mounted = mounts_of(trial.folder)
    if mounted and re.search("No space|disk is full|MB left|[Rr]ead-?only|cannot be", line):
        mount("-o", "remount,size=1g" if mounted[-1] == "tmpfs" else "remount,bind,rw", trial.folder)
    for name in re.findall(r"(?:remove|and) (\S*/\S+?)(?=,? |$)", line):
        path = trial.folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if moved := re.search(r"error: (\S+) is damaged .* move it away", line):
        (trial.folder / moved[1]).rename(trial.folder / f"{moved[1]}.aside")
    if "does not hold embeddings" in line:
        trial.victim.prepare(trial.ground, trial.folder)
    again = re.search(r"proxygml train --resume (\S+)", line)
    if again and not trial.victim.name.startswith("train"):
        trial.ends.append(run(["train", "--resume", again[1].rstrip(".:")], trial.folder))


def go_on(trial: Trial) -> bool:
    """Give the command until it ends well; whether it then has what it has undisturbed."""
    for _ in range(ATTEMPTS):
        follow(trial, trial.ends[-1].line)
        if trial.ended(trial.start()).code == 0:
            break
    try:
        equal = trial.victim.outcome(trial.folder) == trial.expected
    except (OSError, ValueError) as error:
        trial.notes.append(f"wrong: {error}")
        return False
    return equal


def mount(*words: object) -> None:
    """As the command of this name; a process that was killed may still hold a file."""
    for _ in range(50):
        done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True)
        if done.returncode == 0:
            return
        time.sleep(0.2)
    raise OSError(f"mount {words}: {done.stderr}")


def mounts_of(folder: Path) -> list[str]:
    """The file systems that are mounted on a folder, the last one on top."""
    mounted = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [kind for _, place, kind, *_ in mounted if place == str(folder)]


def size_of(folder: Path) -> int:
    """Bytes of all files, in pages as a tmpfs holds them."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += -(-path.lstat().st_size // 4096) * 4096
        except FileNotFoundError:  # gone meanwhile
            continue
    return total
