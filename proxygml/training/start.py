"""Start and continue runs: `train(recipe, out)` -> Run, and `resume(folder)`."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import nn

from proxygml.display import Progress, no_progress, shown
from proxygml.distributed.lost import explain_lost_process
from proxygml.files import locked, require_unlocked, warn
from proxygml.training import build
from proxygml.training.budget import fit_to_minutes
from proxygml.training.fabric import start_fabric
from proxygml.training.loggers import Logger, Loggers
from proxygml.training.parts import Parts
from proxygml.training.recipe import Recipe
from proxygml.training.resuming import check_changes
from proxygml.training.run import EXPORTED, Run, require_empty
from proxygml.training.summary import show_result
from proxygml.training.trainer import Callback, Trainer


def train(
    recipe: Recipe | str,
    out: str | Path,
    *,
    network: nn.Module | None = None,
    data: Any = None,
    loss: nn.Module | Callable[..., nn.Module] | None = None,
    loggers: Sequence[Logger] = (),
    callbacks: Sequence[Callback] = (),
    minutes: float | None = None,
    progress: bool | Progress = True,
) -> Run:
    """Train by a recipe, or the preset of this name, in a new folder; returns the finished run.

    Objects replace what the recipe names (docs/extend.md): `network` turns images into features, `data` is an
    ImageList, a Dataset of (image, label), arrays or a frame, or these by split; `loss` is a module
    `loss(embeddings, labels)`, or a class that makes one from num_classes and embedding_dim. `loggers` receive the
    scores of every epoch and the pictures. Each callback is called with the log entry of an epoch and the network;
    training ends early when one returns True. `minutes` chooses the size of training images and the number of epochs
    by the speed of this machine. `progress` shows bars and the scores, or receives
    (activity, done, total, note). The folder is created after images, network and loss have been checked.
    """
    parts = Parts(network, data, loss)
    recipe = Recipe.preset(recipe) if isinstance(recipe, str) else recipe
    if not isinstance(recipe, Recipe):
        got = type(recipe).__name__
        raise ValueError(f'expected a Recipe or the name of a preset, got {got}: Recipe.preset("photos", epochs=3)')
    recipe = parts.name_in(recipe).with_absolute_paths()
    parts.require(recipe)
    hooks = Loggers(loggers), tuple(callbacks)
    with shown(progress) as report:
        if minutes is not None:
            recipe = fit_to_minutes(recipe, minutes, parts, report)
        fabric = start_fabric(recipe)
        folder = Path(fabric.broadcast(str(out)))
        require_unlocked(folder)
        require_empty(folder)
        trainer = Trainer(recipe, fabric, report, None, parts, *hooks)
        fabric.barrier()  # all processes have checked the folder
        with locked(folder) if fabric.is_global_zero else nullcontext():  # the first process locks for all
            if fabric.is_global_zero:
                Run.create(folder, trainer.recipe)
            trainer.progress("run folder", 0, 0, str(folder))
            run = _finish(trainer, Run(folder))
    if progress is True and trainer.writes:
        show_result(run.recipe, run.scores)
    return run


def resume(
    folder: str | Path,
    recipe: Recipe | None = None,
    *,
    network: nn.Module | None = None,
    data: Any = None,
    loss: nn.Module | Callable[..., nn.Module] | None = None,
    loggers: Sequence[Logger] = (),
    callbacks: Sequence[Callback] = (),
    progress: bool | Progress = True,
) -> Run:
    """Continue after the last finished epoch; the result is bit-identical to that of an uninterrupted run.

    `recipe` may change the settings in `resuming.CHANGEABLE`; other changes are an error. Objects that were passed to
    `train` are passed again.
    """
    parts, hooks = Parts(network, data, loss), (Loggers(loggers), tuple(callbacks))
    run = Run.open(folder)
    if (run.folder / EXPORTED).exists():
        raise ValueError(f"{folder} is an exported model, which cannot be resumed: train a new run, or resume its own")
    with shown(progress) as report:
        trainer = _continue(run, (recipe or run.recipe).with_absolute_paths(), parts, *hooks, report)
    if progress is True and trainer.writes:
        show_result(run.recipe, run.scores)
    return run


def _continue(
    run: Run, recipe: Recipe, parts: Parts, loggers: Loggers, callbacks: Sequence[Callback], progress: Progress
) -> Trainer:
    """Train the remaining epochs of a run."""
    recipe = parts.name_as_before(recipe, run.recipe)
    parts.require(recipe)
    build.require_data(recipe, run.folder)
    here = recipe
    if build.find_device(recipe.device) is None:
        warn(f"this machine has no {recipe.device}: continuing on the CPU")
        here = recipe.changed({"device": "cpu"})
    fabric = start_fabric(here)
    progress = progress if fabric.is_global_zero else no_progress
    with locked(run.folder) if fabric.is_global_zero else nullcontext():
        if fabric.is_global_zero:
            run.clear()
            checkpoint = run.load_last()
        fabric.barrier()  # the first process has moved a damaged checkpoint away
        if not fabric.is_global_zero:
            checkpoint = run.load_last()
        expected = {"log": list, "scores": dict, "best": dict}
        if checkpoint is not None and not all(
            isinstance(checkpoint.get(name), kind) for name, kind in expected.items()
        ):
            raise ValueError(f"last.pt in {run.folder} is not the state of a run: remove it to start the run again")
        if checkpoint is not None:
            check_changes(recipe, checkpoint, progress)
        if recipe.shard and checkpoint is not None:
            checkpoint["shards"] = run.shards(len(checkpoint["log"]))
        trainer = Trainer(here, fabric, progress, checkpoint, parts, loggers, callbacks)
        if fabric.is_global_zero and recipe != run.recipe:
            run.write_recipe(recipe)
        _finish(trainer, run)
        return trainer


def _finish(trainer: Trainer, run: Run) -> Run:
    remedy = f"Continue with --resume {run.folder}"
    with explain_lost_process(trainer.fabric, lambda: trainer.loop.position, remedy):
        return trainer.finish(run)
