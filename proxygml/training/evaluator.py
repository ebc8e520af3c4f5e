"""Embeds and scores images during training, with the settings of a recipe."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import nn

from proxygml import evaluation
from proxygml.data import ImageList
from proxygml.data.images import Crops
from proxygml.display import Progress
from proxygml.embeddings import Embeddings, embed, raw_pixels
from proxygml.losses.interface import normalized
from proxygml.training import build
from proxygml.training.recipe import Recipe

if TYPE_CHECKING:  # slow to import: a model evaluates without it
    from lightning_fabric import Fabric


class Evaluator:
    """Embeds and scores images on the devices and processes of a Fabric."""

    def __init__(self, recipe: Recipe, fabric: "Fabric", progress: Progress) -> None:
        self.recipe, self.fabric, self.progress = recipe, fabric, progress

    def embed(self, model: nn.Module, images: ImageList, what: str) -> Embeddings:
        """Embeddings of the center crops of images."""
        return embed(
            model,
            build.test_crops(self.recipe, images),
            np.asarray(images.paths),
            workers=self.recipe.workers,
            device=self.fabric.device,
            process=(self.fabric.global_rank, self.fabric.world_size),
            progress=lambda done, total: self.progress(what, done, total, ""),
        )

    def score(self, model: nn.Module, images: ImageList, what: str, *, cluster: bool) -> evaluation.Scores:
        """The scores of a network on images."""
        return self.evaluate(self.embed(model, images, what), images, cluster=cluster)

    def evaluate(self, embeddings: Embeddings, images: ImageList, *, cluster: bool) -> evaluation.Scores:
        """The scores of the images' embeddings; processes share the search for neighbors, and the first one clusters.

        If the images have queries, those are searched for among the others.
        """
        scores = evaluation.evaluate(
            **by_query(embeddings, images.queries),
            recall_at=self.recipe.recall_at,
            cluster=cluster and self.fabric.is_global_zero,
            seed=self.recipe.seed,
            process=(self.fabric.global_rank, self.fabric.world_size),
        )
        return self.fabric.broadcast(scores)

    def score_prefixes(self, embeddings: Embeddings, images: ImageList) -> dict[str, dict]:
        """The scores of nested embeddings by number of dimensions: of so many first ones, scaled to length 1."""
        scores = {}
        for width in self.recipe.nested:
            vectors = normalized(torch.from_numpy(embeddings.vectors[:, :width])).numpy()
            scores[str(width)] = self.evaluate(replace(embeddings, vectors=vectors), images, cluster=False).to_json()
        return scores

    def compare_with(self, model: nn.Module, images: ImageList) -> tuple[dict[str, evaluation.Scores], np.ndarray]:
        """Scores of the baselines, the trunk before training and raw pixels, and the trunk's `nearest_images`."""
        bare = build.without_head(model, self.recipe, normalize=True).to(self.fabric.device)
        before = self.embed(bare, images, "scoring the network before training")
        untrained = self.evaluate(before, images, cluster=True)
        self.progress("scoring raw pixels", 0, 1, "")
        pixels = raw_pixels(cast(Crops, build.test_crops(self.recipe, replace(images, features=None))))
        embeddings = Embeddings(pixels, images.labels, np.asarray(images.paths))
        of_pixels = self.evaluate(embeddings, images, cluster=True)
        return {"untrained": untrained, "pixels": of_pixels}, nearest_images(before.vectors, images.queries)


def by_query(embeddings: Embeddings, queries: np.ndarray | None) -> dict[str, Any]:
    """Arguments of `evaluation.evaluate`: if there are queries (M,), those are searched for among the others."""
    vectors, labels = embeddings.vectors, embeddings.labels
    if queries is None:
        return {"vectors": vectors, "labels": labels}
    return {
        "vectors": vectors[queries],
        "labels": labels[queries],
        "gallery": vectors[~queries],
        "gallery_labels": labels[~queries],
    }


def nearest_images(vectors: np.ndarray, queries: np.ndarray | None, count: int = 5) -> np.ndarray:
    """Indices (Q, K) of the images nearest to each image or, with `queries` (M,), to each of these among the others."""
    if queries is None:
        return evaluation.neighbors(vectors, count=min(count, len(vectors) - 1))[0]
    others = np.flatnonzero(~queries)  # (G,)
    return others[evaluation.neighbors(vectors[queries], vectors[others], count=min(count, len(others)))[0]]
