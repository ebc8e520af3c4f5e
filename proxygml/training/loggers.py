"""Loggers of a run: what they receive, and what happens when one fails."""

import csv
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from proxygml.files import atomic_write, one_line, warn
from proxygml.optional import library

PICTURES = ("retrieval", "map")


class Logger(Protocol):
    """What `loggers=` takes: Fabric's and Lightning's loggers, or any object with this method.

    A logger may also have `finalize(status)`, and take pictures by `log_image(name, [path], step=...)` or as
    TensorBoard does.
    """

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None: ...


class CSVLog:
    """A CSV with a row per epoch; a resumed run continues it, where Fabric's CSVLogger starts again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None:
        """Add to the row of this epoch."""
        rows: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            with self.path.open(newline="") as file:
                rows = {row["epoch"]: row for row in csv.DictReader(file)}
        rows[str(step)] = rows.get(str(step), {}) | metrics | {"epoch": step}
        with atomic_write(self.path) as draft, draft.open("w", newline="") as file:
            names = dict.fromkeys(name for row in rows.values() for name in row)
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows.values())


def make_logger(name: str, folder: Path) -> Logger:
    """TensorBoard's event files or a CSV in a folder."""
    if name == "csv":
        return CSVLog(folder / "metrics.csv")
    library("tensorboard", extra="tensorboard", user="--log tensorboard")
    from lightning_fabric.loggers import TensorBoardLogger

    return TensorBoardLogger(root_dir=folder, name="tensorboard", version="")


class Loggers:
    """All loggers of a run; one that raises an error is left out from then on, with a warning."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        if not isinstance(loggers, Sequence):
            raise ValueError(f"expected loggers as a list, got one {type(loggers).__name__}: pass [logger]")
        for logger in loggers:
            if not callable(getattr(logger, "log_metrics", None)):
                raise ValueError(f"expected loggers with log_metrics(metrics, step), got {type(logger).__name__}")
        self.loggers = list(loggers)

    def log(self, entry: Mapping[str, Any], step: int) -> None:
        """Log the numbers of an entry, with names such as held_out/recall@1."""
        self._call("log_metrics", lambda logger: logger.log_metrics(flatten(entry), step))

    def finish(self, folder: Path, step: int) -> None:
        """Log the retrieval sheet and the map, where a logger takes pictures, and let all write what they have kept."""
        for path in (folder / f"{name}.png" for name in PICTURES):
            if path.exists():
                self._call("log_image", partial(log_picture, path=path, step=step))
        self._call("finalize", lambda logger: logger.finalize("success") if hasattr(logger, "finalize") else None)

    def _call(self, method: str, call: Callable[[Any], object]) -> None:
        for logger in list(self.loggers):
            try:
                call(logger)
            except Exception as error:  # training is worth more than its log
                self.loggers.remove(logger)
                what = f"{type(logger).__name__}.{method} failed ({type(error).__name__}: {one_line(error)})"
                warn(f"{what}: training continues without this logger")


def log_picture(logger: Any, path: Path, step: int) -> None:
    """Log a picture if the logger takes pictures."""
    if hasattr(logger, "log_image"):  # as Lightning's loggers of Weights & Biases and Comet have it
        logger.log_image(path.stem, [str(path)], step=step)
    elif hasattr(logger, "experiment") and hasattr(logger.experiment, "add_image"):  # TensorBoard
        with Image.open(path) as image:
            logger.experiment.add_image(path.stem, np.asarray(image.convert("RGB")), step, dataformats="HWC")


def flatten(entry: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of an entry by names such as held_out/recall@1."""
    flat: dict[str, float] = {}
    for name, value in entry.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[f"{prefix}{name}"] = value
    return flat
