"""How good a network is, as a recipe asks: its embeddings of images, their scores, and what it is compared with."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import cast

import numpy as np
from lightning_fabric import Fabric
from torch import nn

from proxygml import evaluation
from proxygml.backbones import without_head
from proxygml.backbones.trunk import Trunk
from proxygml.data import ImageList
from proxygml.data.images import Crops
from proxygml.embeddings import Embeddings, embed, raw_pixels
from proxygml.training import build
from proxygml.training.recipe import Recipe
from proxygml.training.run import Progress, Run, no_progress


class Evaluator:
    """Embeds and scores where and how the recipe computes; `progress` is told what is going on."""

    def __init__(self, recipe: Recipe, fabric: Fabric, progress: Progress) -> None:
        self.recipe, self.fabric, self.progress = recipe, fabric, progress

    def embed(self, model: nn.Module, images: ImageList, what: str) -> Embeddings:
        """The embeddings of images as a network sees them without augmentation."""
        return embed(
            model,
            build.test_crops(self.recipe, images),
            np.asarray(images.paths),
            batch_size=max(128, self.recipe.batch_size),
            workers=self.recipe.workers,
            device=self.fabric.device,
            process=(self.fabric.global_rank, self.fabric.world_size),
            progress=lambda done, total: self.progress(what, done, total, ""),
        )

    def score(self, model: nn.Module, images: ImageList, what: str, *, cluster: bool) -> evaluation.Scores:
        """The scores of a network on images."""
        return self.evaluate(self.embed(model, images, what), cluster=cluster)

    def evaluate(self, embeddings: Embeddings, *, cluster: bool) -> evaluation.Scores:
        """The scores of embeddings; of several processes each finds a part, and the first one clusters for all."""
        scores = evaluation.evaluate(
            embeddings.vectors,
            embeddings.labels,
            recall_at=self.recipe.recall_at,
            cluster=cluster and self.fabric.is_global_zero,
            seed=self.recipe.seed,
            process=(self.fabric.global_rank, self.fabric.world_size),
        )
        return self.fabric.broadcast(scores)

    def compare_with(self, model: nn.Module, images: ImageList) -> dict[str, dict]:
        """What a trained network has to beat: raw pixels, and its own trunk before training."""
        bare = without_head(cast(Trunk, model.trunk), self.recipe.pooling).to(self.fabric.device)
        untrained = self.score(bare, images, "scoring the network before training", cluster=True)
        self.progress("scoring raw pixels", 0, 1, "")
        pixels = raw_pixels(cast(Crops, build.test_crops(self.recipe, replace(images, features=None))))
        rows = Embeddings(pixels, images.labels, np.asarray(images.paths))
        return {"untrained": untrained.to_json(), "pixels": self.evaluate(rows, cluster=True).to_json()}


def embed_images(run: Run, images: ImageList, *, progress: Progress | None = None) -> Embeddings:
    """The embeddings of images by the trained network of a run, where and how its recipe computes.

    In one process, however many have trained it, or in those that torchrun has started.
    """
    (embeddings,) = embed_each(run, [images], progress=progress)
    return embeddings


def embed_each(run: Run, lists: Iterable[ImageList], *, progress: Progress | None = None) -> Iterator[Embeddings]:
    """As `embed_images`, of one list of images after another."""
    fabric = build.start_fabric(run.recipe.changed({"devices": 1, "nodes": 1}))
    evaluator = Evaluator(run.recipe, fabric, progress or no_progress)
    model, model_id = fabric.setup_module(build.load_model(run)), run.model_id
    for images in lists:
        embeddings = evaluator.embed(model, images, "embedding")
        yield replace(embeddings, class_names=np.asarray(images.class_names), model=model_id)
