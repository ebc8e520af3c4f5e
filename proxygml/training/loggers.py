"""Loggers of a run: what they receive, and what happens when one fails."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from proxygml.files import one_line
from proxygml.optional import library

PICTURES = ("retrieval", "map")


class Logger(Protocol):
    """What `loggers=` takes: Fabric's and Lightning's loggers, or any object with this method."""

    def log_metrics(self, metrics: dict[str, Any], step: int) -> None: ...


def make_logger(name: str, folder: Path) -> Logger:
    """TensorBoard's event files or a CSV in a folder."""
    from lightning_fabric.loggers import CSVLogger, TensorBoardLogger

    if name == "csv":
        return CSVLogger(root_dir=folder, name="csv", version="", flush_logs_every_n_steps=1)
    library("tensorboard", extra="tensorboard", user="--log tensorboard")
    return TensorBoardLogger(root_dir=folder, name="tensorboard", version="")


class Loggers:
    """All loggers of a run; one that raises an error is left out from then on, with a warning."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        for logger in loggers:
            if not callable(getattr(logger, "log_metrics", None)):
                raise ValueError(f"expected loggers with log_metrics(metrics, step), got {type(logger).__name__}")
        self.loggers = list(loggers)

    def log_epoch(self, entry: Mapping[str, Any]) -> None:
        """Log an entry of the log, with names such as held_out/recall@1."""
        metrics = flatten(entry)
        for logger in list(self.loggers):
            self._call(logger, "log_metrics", metrics, step=entry["epoch"])

    def log_pictures(self, folder: Path, step: int) -> None:
        """Log the retrieval sheet and the map, where a logger takes pictures."""
        for logger in list(self.loggers):
            for name in PICTURES:
                path = folder / f"{name}.png"
                if path.exists():
                    self._log_picture(logger, name, path, step)

    def finish(self) -> None:
        """Let loggers write what they have kept."""
        for logger in list(self.loggers):
            if hasattr(logger, "finalize"):
                self._call(logger, "finalize", "success")

    def _log_picture(self, logger: Any, name: str, path: Path, step: int) -> None:
        if hasattr(logger, "log_image"):  # as Lightning's loggers of Weights & Biases and Comet have it
            self._call(logger, "log_image", name, [str(path)], step=step)
        elif hasattr(getattr(logger, "experiment", None), "add_image"):  # TensorBoard
            with Image.open(path) as image:
                pixels = np.asarray(image.convert("RGB"))
            self._call(logger.experiment, "add_image", name, pixels, step, dataformats="HWC", owner=logger)

    def _call(self, target: Any, method: str, *arguments: Any, owner: Any = None, **options: Any) -> None:
        try:
            getattr(target, method)(*arguments, **options)
        except Exception as error:  # training is worth more than its log
            logger = owner or target
            if logger in self.loggers:
                self.loggers.remove(logger)
            what = f"{type(logger).__name__}.{method} failed ({type(error).__name__}: {one_line(error)})"
            warnings.warn(f"{what}: training continues without this logger", stacklevel=2)


def flatten(entry: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of an entry by names such as held_out/recall@1."""
    flat: dict[str, float] = {}
    for name, value in entry.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}/")
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            flat[f"{prefix}{name}"] = value
    return flat
