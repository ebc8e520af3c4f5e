"""Training: `train(recipe, folder)` -> Run.

Order, crops and learning rates are functions of (seed, epoch, step), so that a run that was stopped and one that was
not go through the same numbers.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np

from proxygml import ingredients
from proxygml.datasets import ImageList
from proxygml.embeddings import Embeddings
from proxygml.judging import Judge
from proxygml.locks import locked
from proxygml.recipes import Recipe
from proxygml.runs import Run, refuse_taken
from proxygml.sessions import Progress, Session, nobody_watches


def train(recipe: Recipe, folder: Path, *, progress: Progress | None = None) -> Run:
    """Train from the beginning in a new folder, which is made once images, network and loss are known to fit."""
    fabric = ingredients.start_fabric(recipe)
    folder = Path(fabric.broadcast(str(folder)))
    refuse_taken(folder)
    session = Session(recipe, fabric, progress or nobody_watches, checkpoint=None)
    fabric.barrier()  # nobody looks any more whether the folder is taken
    with locked(folder) if fabric.is_global_zero else nullcontext():  # of several processes the first holds it for all
        if fabric.is_global_zero:
            Run.create(folder, recipe)
        session.progress("run folder", 0, 0, str(folder))
        return session.finish_together(Run(folder))


def resume(folder: Path, *, progress: Progress | None = None) -> Run:
    """Go on after the last finished epoch, to the end that an undisturbed run would have reached."""
    run = Run.open(Path(folder))
    fabric = ingredients.start_fabric(run.recipe)
    with locked(run.folder) if fabric.is_global_zero else nullcontext():
        if fabric.is_global_zero:
            run.clear()
        checkpoint = run.load_last()
        expected = {"log": list, "scores": dict, "best": dict}
        if checkpoint is not None and not all(
            isinstance(checkpoint.get(name), kind) for name, kind in expected.items()
        ):
            raise ValueError(f"last.pt in {folder} is not the state of a run: remove it, and the run begins again")
        if run.recipe.shard and checkpoint is not None:
            checkpoint["shards"] = run.shards(len(checkpoint["log"]))
        return Session(run.recipe, fabric, progress or nobody_watches, checkpoint).finish_together(run)


def load_model(run: Run) -> ingredients.Network:
    """The trained network of a run, in evaluation mode."""
    model = ingredients.build_model(run.recipe)
    try:
        model.load_state_dict(run.load_best()["model"])
    except RuntimeError as error:
        raise ValueError(f"best.pt in {run.folder} does not fit its recipe.json: was one of them changed?") from error
    return model.eval()


def embed_images(run: Run, images: ImageList, *, progress: Progress | None = None) -> Embeddings:
    """The embeddings of images by the trained network of a run, where and how its recipe computes.

    In one process, however many have trained it, or in those that torchrun has started.
    """
    (embeddings,) = embed_each(run, [images], progress=progress)
    return embeddings


def embed_each(run: Run, lists: Iterable[ImageList], *, progress: Progress | None = None) -> Iterator[Embeddings]:
    """As `embed_images`, of one list of images after another."""
    fabric = ingredients.start_fabric(run.recipe.changed({"devices": 1, "nodes": 1}))
    judge = Judge(run.recipe, fabric, progress or nobody_watches)
    model, mark = fabric.setup_module(load_model(run)), run.mark
    for images in lists:
        embeddings = judge.embed(model, images, "embedding")
        yield replace(embeddings, class_names=np.asarray(images.class_names), model=mark)
