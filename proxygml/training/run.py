"""What happened: a Run is a folder with its recipe, log, checkpoints, scores and pictures."""

import errno
import hashlib
import json
import os
import pickle
import platform
import shlex
import shutil
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from proxygml.files import (
    UnwritableError,
    atomic_write,
    one_line,
    parse_json,
    reject_zip_bomb,
    remove_temporaries,
    require_unlocked,
    verify_checksum,
    with_checksum,
)
from proxygml.training.recipe import Recipe
from proxygml.version import __version__

Progress = Callable[[str, int, int, str], None]  # what is going on, done, of how many (0: just a remark), a note
UNTRAINED = "no best.pt in {}: train it first with proxygml train --resume"


@dataclass(frozen=True)
class Run:
    """A folder: recipe.json, log.jsonl, last.pt (and previous.pt), best.pt, scores.json and pictures."""

    folder: Path

    @classmethod
    def create(cls, folder: Path, recipe: Recipe) -> "Run":
        """A new run in an empty or absent folder."""
        refuse_taken(folder)
        with atomic_write(folder / "recipe.json") as path:
            path.write_text(recipe.to_json())
        return cls(folder)

    @classmethod
    def open(cls, folder: Path) -> "Run":
        """The run that `create` began."""
        if not (folder / "recipe.json").is_file():
            raise FileNotFoundError(f"no recipe.json in {folder}: that is not the folder of a run")
        return cls(folder)

    @property
    def recipe(self) -> Recipe:
        path = self.folder / "recipe.json"
        try:
            return Recipe.from_json(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not a recipe: {one_line(error)}") from error

    @property
    def log(self) -> list[dict]:
        """One entry per finished epoch; a half-written last line is left out, and what comes after a damaged one."""
        path = self.folder / "log.jsonl"
        entries = []
        for line in path.read_bytes().split(b"\n") if path.exists() else []:
            try:
                entry = parse_json(line)
            except ValueError:
                break
            if not isinstance(entry, dict):
                break
            entries.append(entry)
        return entries

    def write_log(self, entries: list[dict]) -> None:
        """Replace the log by these entries."""
        with atomic_write(self.folder / "log.jsonl") as path:
            path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))

    @property
    def scores(self) -> dict:
        """Test scores by name (trained, untrained, pixels) of a finished run."""
        path = self.folder / "scores.json"
        if not path.exists():
            raise FileNotFoundError(f"no scores.json in {self.folder}: finish it with proxygml train --resume")
        try:
            scores = parse_json(path.read_bytes())
            if not isinstance(scores, dict):
                raise ValueError("no JSON object")
            return verify_checksum(scores)
        except ValueError as error:
            remedy = f"write it again with proxygml train --resume {self.folder}"
            raise ValueError(f"{path} is damaged ({one_line(error)}): {remedy}") from error

    def write_scores(self, scores: dict) -> None:
        """Write scores.json, with what made them beside them."""
        with atomic_write(self.folder / "scores.json") as path:
            path.write_text(json.dumps(with_checksum(scores | {"made_by": provenance()}), indent=2) + "\n")

    def save_last(self, state: dict) -> None:
        """Write last.pt; the one before it stays as previous.pt."""
        with atomic_write(self.folder / "last.pt") as path:
            save_checkpoint(state, path)
            if (self.folder / "last.pt").exists():
                (self.folder / "last.pt").replace(self.folder / "previous.pt")

    def load_last(self) -> dict | None:
        """The newest checkpoint that is whole, with a warning if that is not the last; None where there is none."""
        last, previous = self.folder / "last.pt", self.folder / "previous.pt"
        if last.exists():
            try:
                return load_checkpoint(last)
            except ValueError as error:
                # Without a previous one the run was in its first epochs: it begins again.
                goes_on = "the one before it is used" if previous.exists() else "the run begins again"
                warnings.warn(f"{error}: {goes_on}", stacklevel=2)
        try:
            return load_checkpoint(previous) if previous.exists() else None
        except ValueError as error:
            raise ValueError(f"{error}: {self._begin_again}") from error

    @property
    def _begin_again(self) -> str:
        """What helps where no checkpoint does."""
        last, previous = self.folder / "last.pt", self.folder / "previous.pt"
        return f"remove {last} and {previous}, then --resume {self.folder} trains again from the beginning"

    def shards(self, epoch: int) -> Path:
        """Where the processes write the proxies that are spread over them, after so many epochs."""
        return self.folder / f"proxies-{epoch:04d}"

    def clear_shards(self, epoch: int, writes: bool) -> None:
        """Before an epoch's are written: what an interrupted process left of them, and those of two epochs before."""
        if writes:
            for old in (epoch, epoch - 2):
                shutil.rmtree(self.shards(old), ignore_errors=True)

    def save_best(self, state: dict) -> None:
        """Write best.pt: the weights to use."""
        with atomic_write(self.folder / "best.pt") as path:
            save_checkpoint(state, path)

    @property
    def model_id(self) -> str:
        """What tells its trained network from every other; the same of equal weights that were written twice."""
        with self._best() as path, _explained(path), zipfile.ZipFile(path) as archive:
            records = [(info.filename.split("/", 1)[-1], info.CRC) for info in archive.infolist()]
        # Names begin with that of the file, of which the number of this serialization is made too.
        content = [record for record in sorted(records) if not record[0].endswith("serialization_id")]
        return hashlib.sha256(repr(content).encode()).hexdigest()[:16]

    def load_best(self) -> dict:
        """The weights to use."""
        with self._best() as path:
            state = load_checkpoint(path)
            if not isinstance(state.get("model"), dict) or not isinstance(state.get("loss", {}), dict):
                names = one_line(", ".join(map(str, state)) or "nothing", max_length=100)
                raise ValueError(f"{path} does not hold the network of a run: expected a model, got {names}")
            return state

    @contextmanager
    def _best(self) -> Iterator[Path]:
        path = self.folder / "best.pt"
        if not path.exists():
            raise FileNotFoundError(UNTRAINED.format(self.folder))
        try:
            yield path
        except ValueError as error:
            raise ValueError(f"{error}: make it again with proxygml train --resume {self.folder}") from error

    def refuse_best(self, epoch: int) -> None:
        """An error that says what to do where best.pt is not of this epoch, whose weights are nowhere else."""
        raise ValueError(f"{self.folder / 'best.pt'} is no longer that of epoch {epoch}, the best: {self._begin_again}")

    def clear(self) -> None:
        """Remove what killed processes have left of writing its files, which nobody may be writing now."""
        for name in ("recipe.json", "log.jsonl", "last.pt", "best.pt", "scores.json"):
            remove_temporaries(self.folder / name)


def provenance() -> dict[str, str | None]:
    """What a result was made by: command, versions, commit (None outside a checkout) and machine."""
    return {
        "command": shlex.join(["proxygml", *sys.argv[1:]]),
        "proxygml": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "machine": machine(),
    }


def machine() -> str:
    """What this machine has."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()}, {os.cpu_count()} cores, {gpu}"


def _commit() -> str | None:
    """The commit of this package, with "-dirty" where it or the benchmarks were changed since; results may be."""
    if not shutil.which("git"):
        return None
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "--", ".", ":/benchmarks"], capture_output=True, text=True)
    return commit.stdout.strip() + "-dirty" * bool(changed.stdout) if commit.returncode == 0 else None


def refuse_taken(folder: Path) -> None:
    """An error if there is something in the folder already, but for what a process that was killed at once left."""
    if folder.exists() and any(not path.name.startswith(".") for path in folder.iterdir()):
        require_unlocked(folder)
        raise FileExistsError(f"{folder} is not empty: choose another --out, or continue with --resume {folder}")


def save_checkpoint(state: dict, path: Path) -> None:
    """Write tensors and plain values to `path`."""
    try:
        torch.save(state, path)
    except RuntimeError as error:  # torch's file writer does not pass on what the system said
        free = shutil.disk_usage(path.parent).free / 2**20
        raise UnwritableError(f"could not write a checkpoint to {path.parent}, which has {free:.1f} MB left") from error


def load_checkpoint(path: Path) -> dict:
    """What `save_checkpoint` wrote; a truncated or altered file is a ValueError."""
    with _explained(path), path.open("rb") as file:
        reject_zip_bomb(file)
        with zipfile.ZipFile(file) as archive:
            altered = archive.testzip()  # compares the checksum of every record
        if altered is not None:
            raise ValueError(f"{altered} is altered")
        state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise ValueError(f"{path} is no checkpoint: expected values by name, got {type(state).__name__}")
    return state


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """What goes wrong inside while a checkpoint is read, as a ValueError."""
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds more than weights and plain values: it is not opened") from error
    except Exception as error:  # zipfile and torch raise whatever they stumble over, EINVAL where they seek to nowhere
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise ValueError(f"{path} is damaged: {one_line(error, max_length=120)}") from error


def no_progress(what: str, done: int, total: int, note: str) -> None:
    pass
