"""Run: a folder with recipe, log, checkpoints, scores and plots."""

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from proxygml.files import (
    atomic_write,
    one_line,
    parse_json,
    remove_temporaries,
    require_file,
    require_unlocked,
    verify_checksum,
    warn,
    with_checksum,
)
from proxygml.training.checkpoints import load_checkpoint, load_weights, save_checkpoint, save_weights, weights_checksum
from proxygml.training.recipe import Recipe
from proxygml.training.summary import PICTURES
from proxygml.version import __version__

WEIGHTS = "model.safetensors"
EXPORTED = "preprocessing.json"  # makes a folder an exported model
UNTRAINED = "no model.safetensors in {}: train it first with proxygml train --resume"


@dataclass(frozen=True)
class Run:
    """A folder: recipe.json, log.jsonl, last.pt (and previous.pt), model.safetensors, scores.json and plots."""

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))  # may be a str

    @classmethod
    def create(cls, folder: str | Path, recipe: Recipe) -> "Run":
        """A new run in an empty or absent folder."""
        run = cls(Path(folder))
        require_empty(run.folder)
        run.write_recipe(recipe)
        return run

    @classmethod
    def open(cls, folder: str | Path) -> "Run":
        """An existing run."""
        if not Path(folder, "recipe.json").is_file():
            raise FileNotFoundError(f"no recipe.json in {folder}: that is not the folder of a run")
        return cls(Path(folder))

    @property
    def recipe(self) -> Recipe:
        path = self.folder / "recipe.json"
        try:
            return Recipe.from_json(require_file(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not a recipe: {one_line(error)}") from error

    def write_recipe(self, recipe: Recipe) -> None:
        """Write recipe.json, with absolute paths."""
        with atomic_write(self.folder / "recipe.json") as path:
            path.write_text(recipe.with_absolute_paths().to_json())

    @property
    def log(self) -> list[dict]:
        """One entry per finished epoch, up to the first damaged or incomplete line."""
        path = self.folder / "log.jsonl"
        entries = []
        for line in require_file(path).read_bytes().split(b"\n") if path.exists() else []:
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
            scores = parse_json(require_file(path).read_bytes())
            if not isinstance(scores, dict):
                raise ValueError("no JSON object")
            return verify_checksum(scores)
        except ValueError as error:
            remedy = f"write it again with proxygml train --resume {self.folder}"
            raise ValueError(f"{path} is damaged ({one_line(error)}): {remedy}") from error

    def write_scores(self, scores: dict) -> None:
        """Write scores.json, with its provenance and a checksum."""
        with atomic_write(self.folder / "scores.json") as path:
            path.write_text(json.dumps(with_checksum(scores | {"made_by": provenance()}), indent=2) + "\n")

    def save_last(self, state: dict) -> None:
        """Write last.pt; the old one becomes previous.pt."""
        with atomic_write(self.folder / "last.pt") as path:
            save_checkpoint(state, path)
            if (self.folder / "last.pt").exists():
                (self.folder / "last.pt").replace(self.folder / "previous.pt")

    def load_last(self) -> dict | None:
        """The newest undamaged checkpoint; None if there is none.

        A damaged last.pt becomes damaged.pt, with a warning, so that it never replaces previous.pt.
        """
        last, previous = self.folder / "last.pt", self.folder / "previous.pt"
        damage = None
        if last.exists():
            try:
                return load_checkpoint(last)
            except ValueError as error:
                damage = error
        try:
            checkpoint = load_checkpoint(previous) if previous.exists() else None
        except ValueError as error:
            raise ValueError(f"{error}: {self._restart_hint}") from error
        if damage is not None:
            last.replace(self.folder / "damaged.pt")
            fallback = "starting the run again" if checkpoint is None else "using the one before it"
            warn(f"{damage}: {fallback}")
        return checkpoint

    @property
    def _restart_hint(self) -> str:
        """How to train again if no checkpoint can be used."""
        last, previous = self.folder / "last.pt", self.folder / "previous.pt"
        return f"remove {last} and {previous}, then --resume {self.folder} trains again from the beginning"

    def shards(self, epoch: int) -> Path:
        """The folder of sharded proxies after this many epochs."""
        return self.folder / f"proxies-{epoch:04d}"

    def clear_shards(self, epoch: int) -> None:
        """Remove an interrupted process's shards of this epoch, and those of two epochs before."""
        for old in (epoch, epoch - 2):
            shutil.rmtree(self.shards(old), ignore_errors=True)

    def save_best(self, state: dict) -> None:
        """Write model.safetensors: the weights to use."""
        with atomic_write(self.folder / WEIGHTS) as path:
            save_weights(state, path)

    @property
    def model_id(self) -> str:
        """A hash of the trained weights, and their precision unless that is float32: equal ids give equal vectors."""
        precision = self.recipe.precision
        with self._best() as path:
            return weights_checksum(path)[:16] + ("" if precision == "32-true" else f"-{precision}")

    def load_best(self) -> dict:
        """The weights to use."""
        with self._best() as path:
            return load_weights(path)

    @contextmanager
    def _best(self) -> Iterator[Path]:
        path = self.folder / WEIGHTS
        if not path.exists():
            raise FileNotFoundError(UNTRAINED.format(self.folder))
        try:
            yield path
        except ValueError as error:
            raise ValueError(f"{error}: write it again with proxygml train --resume {self.folder}") from error

    def raise_best_lost(self, epoch: int) -> None:
        """Raise the error for a model.safetensors without the weights of the best epoch."""
        raise ValueError(f"{self.folder / WEIGHTS} is not from epoch {epoch}, the best: {self._restart_hint}")

    def clear(self) -> None:
        """Remove temporary files of killed processes."""
        names = ("recipe.json", "log.jsonl", "scores.json", "last.pt", WEIGHTS, *PICTURES)
        remove_temporaries(*(self.folder / name for name in names))


def provenance() -> dict[str, str | None]:
    """Command, versions, commit (None outside a checkout) and machine of a result."""
    return {
        "command": shlex.join(["proxygml", *sys.argv[1:]]),
        "proxygml": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "machine": machine(),
    }


def machine() -> str:
    """Architecture, cores and GPU of this machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()}, {os.cpu_count()} cores, {gpu}"


def _commit() -> str | None:
    """The commit of this package, with "-dirty" if package or benchmarks were changed since."""
    if not shutil.which("git"):
        return None
    git = ["git", "-C", str(Path(__file__).parent)]
    commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*git, "status", "--porcelain", "--", ".", ":/benchmarks"], capture_output=True, text=True)
    return commit.stdout.strip() + "-dirty" * bool(changed.stdout) if commit.returncode == 0 else None


def require_empty(folder: Path) -> None:
    """Raise an error unless the folder is free for a new run.

    Hidden files do not count, which a killed process may have left, nor a run without a finished epoch.
    """
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: choose another --out")
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.exists() else set()
    if not names <= {"recipe.json", "log.jsonl"} or Run(folder).log:
        require_unlocked(folder)
        run = "recipe.json" in names
        hint = f", or continue with --resume {folder}" if run else ": its files are not those of a run"
        raise FileExistsError(f"{folder} is not empty: choose another --out{hint}")
