"""How good a network is, as a recipe asks: its embeddings of images, their scores, and what it is compared with."""

from collections.abc import Callable

import numpy as np
from lightning_fabric import Fabric
from torch import nn

from proxygml import evaluation, ingredients
from proxygml.datasets import ImageList
from proxygml.embeddings import Embeddings, embed, raw_pixels
from proxygml.recipes import Recipe


class Judge:
    """Embeds and scores where and how the recipe computes; `progress` is told what is going on."""

    def __init__(self, recipe: Recipe, fabric: Fabric, progress: Callable[[str, int, int, str], None]) -> None:
        self.recipe, self.fabric, self.progress = recipe, fabric, progress

    def embed(self, model: nn.Module, images: ImageList, what: str) -> Embeddings:
        """The embeddings of images as a network sees them without augmentation."""
        return embed(
            model,
            ingredients.test_crops(self.recipe, images),
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
        bare = ingredients.without_head(model, self.recipe).to(self.fabric.device)
        untrained = self.score(bare, images, "scoring the network before training", cluster=True)
        self.progress("scoring raw pixels", 0, 1, "")
        pixels = raw_pixels(ingredients.center_crops(self.recipe, images))
        rows = Embeddings(pixels, images.labels, np.asarray(images.paths))
        return {"untrained": untrained.to_json(), "pixels": self.evaluate(rows, cluster=True).to_json()}
