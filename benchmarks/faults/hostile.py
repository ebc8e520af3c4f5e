"""Faults of files that are not what they seem, of closed and scarce streams, and of removal during a search."""

import json
import os
import resource
import shutil
import signal
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.faults.injection import Trial, damage
from benchmarks.faults.processes import Command, run
from proxygml.files import LOCK_NAME

MAX_OPEN_FILES = 128  # fewer than shards and a cache of their descriptors need
RECIPE_EDITS = {"seed": 7, "batch_size": 24, "image_size": 24, "embedding_dim": 20, "ratio": 0.25}


def keep_mine(trial: Trial) -> Path:
    """A folder of the user beside that of the trial, which nothing may change."""
    mine = trial.folder.with_name(f"{trial.folder.name}-mine")
    mine.mkdir(exist_ok=True)
    (mine / "letter.txt").write_text("Dear Anna")
    return mine


def changed_mine(folder: Path) -> bool:
    """Whether the user's folder beside that of a trial was changed; it is removed."""
    mine = folder.with_name(f"{folder.name}-mine")
    changed = mine.exists() and {path.name: path.read_text() for path in mine.iterdir()} != {"letter.txt": "Dear Anna"}
    shutil.rmtree(mine, ignore_errors=True)
    return changed


def plant_link(trial: Trial) -> None:
    """Make a lock, or the index of a run, a link to a file or a folder of the user."""
    trial.kill()
    mine = keep_mine(trial)
    for lock in list(trial.folder.rglob(LOCK_NAME)):
        lock.unlink()
        lock.symlink_to(mine / "letter.txt")
        trial.notes.append(f"{lock.relative_to(trial.folder)} is a link")
    trial.wait(trial.start())
    index = trial.folder / "run" / "index"
    if trial.workload.name == "embed" and not index.exists():
        index.symlink_to(mine)
        trial.notes.append("run/index is a link")
        photo = trial.shared / "photos" / "class0" / "0.png"
        trial.exits.append(run(["search", trial.folder / "run", "--image", photo], trial.folder))
        index.unlink()


def make_pipe(trial: Trial, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)
    trial.notes.append("a pipe")


def plant_journal(trial: Trial) -> None:
    """Put a journal beside an index that makes SQLite delete a file of the user."""
    trial.kill(last=0.6)
    while not (database := trial.folder / "index" / "items.sqlite").exists():
        trial.wait(trial.start())
    name, page_size, magic = os.fsencode(keep_mine(trial) / "letter.txt"), 4096, bytes.fromhex("d9d505f920a163d7")
    header = struct.pack(">8s5I", magic, 0, 1, database.stat().st_size // page_size, 512, page_size).ljust(512, b"\0")
    end = struct.pack(">I", 2**30 // page_size + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    database.with_name("items.sqlite-journal").write_bytes(header + end)
    trial.wait(trial.start())


def close_stream(trial: Trial) -> None:
    """Close the output of the command, or the other end of its pipe."""
    kind = trial.rng.choice(["closed", "without a reader"])
    trial.notes.append(f"output {kind}")
    reader, writer = os.pipe()
    os.close(reader)
    options = {"preexec_fn": lambda: os.close(1)} if kind == "closed" else {"stdout": writer}
    command = Command(trial.workload.arguments(trial.shared, trial.folder), trial.folder, fresh=True, **options)
    os.close(writer)
    ended = trial.wait(command)
    if kind == "without a reader" and ended.code == 1 and not ended.message:
        trial.exits[-1] = replace(ended, code=-signal.SIGPIPE)  # as other programs end: nobody reads a message


def limit_descriptors(trial: Trial) -> None:
    """Allow the command fewer open files than it reads shards."""
    limit = (MAX_OPEN_FILES, MAX_OPEN_FILES)
    options = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit)}
    arguments = trial.workload.arguments(trial.shared, trial.folder)
    if trial.wait(Command(arguments, trial.folder, fresh=True, **options)).code:
        trial.notes.append(f"wrong: {MAX_OPEN_FILES} open files were not enough")


def edit_recipe(trial: Trial) -> None:
    """Change a setting of a started run: resuming must refuse it by name."""
    trial.kill(last=0.3)
    path = trial.folder / "run" / "recipe.json"
    while not (trial.folder / "run" / "last.pt").exists():
        trial.wait(trial.start())
    original = path.read_text()
    name = trial.rng.choice(sorted(RECIPE_EDITS))
    trial.notes.append(f"another {name}")
    path.write_text(json.dumps(json.loads(original) | {name: RECIPE_EDITS[name]}))
    ended = trial.wait(trial.start())
    if ended.code != 1 or name not in ended.message:
        trial.notes.append(f"wrong: {name} was not refused by name: {ended.message or 'no error'}")
    path.write_text(original)


def remove_while_searching(trial: Trial) -> None:
    """Remove items from a copy of the index while other processes search it."""
    from proxygml.retrieval import Index

    trial.wait(trial.start())
    copy = trial.folder / "copy"
    shutil.copytree(trial.folder / "index", copy)
    before, removed = trial.rng.randint(20, 60), 0
    search = ["search", copy, "--vectors", trial.folder / "own.npz", "-n", "20"]
    searches = [Command(search, trial.folder, fresh=False) for _ in range(2)]
    for start in range(0, 20 * before, before):
        rows = [str(row) for row in range(start, start + before)]
        ended = run(["index", "remove", copy, *rows], trial.folder)
        trial.exits.append(ended)
        removed += before * (ended.code == 0)
    for command in searches:
        trial.wait(command)
    index = Index.open(copy)
    with np.load(trial.folder / "own.npz", allow_pickle=False) as stored:
        expected = len(stored["labels"]) - removed
    if len(index) != expected:
        trial.notes.append(f"wrong: {len(index)} items are left of {expected}")
    index.close()
    shutil.rmtree(copy)
    trial.notes.append(f"removed {removed}")


HOSTILE: dict[str, Callable[[Trial], None]] = {
    "link": plant_link,
    "pipe": damage(make_pipe),
    "journal": plant_journal,
    "closed output": close_stream,
    "edited recipe": edit_recipe,
    "few open files": limit_descriptors,
    "concurrent removal": remove_while_searching,
}
