"""How samples and links develop in training, with a few, all, or fewer and fewer of the proxies linked."""

from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from proxygml.display import no_progress
from proxygml.losses.proxygml.chunked import link
from proxygml.losses.proxygml.module import ProxyGMLLoss
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import Results
from proxygml.paper.running import summary
from proxygml.paper.tables import Table
from proxygml.training import build
from proxygml.training.features import prepare_images
from proxygml.training.loop import scheduled_links
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run
from proxygml.training.start import train

SAMPLES = 512  # training images that are measured
MEASURES = {
    "samples": "mean cosine between samples",
    "proxies": "mean cosine between proxies of a class",
    "classes": "classes linked to a sample",
}
ROWS: dict[str, dict[str, object]] = {
    "r = 0.05": {"ratio": 0.05},
    "r = 1": {"ratio": 1.0},
    "r from 1 to 0.05": {"ratio": 0.05, "start_ratio": 1.0},
}


def measure(recipe: Recipe, folder: Path) -> dict:
    """The three measures after every epoch, and the scores at the end."""
    images, _ = build.load_images(recipe)
    model = build.build_model(recipe)
    images = prepare_images(images, "training", recipe, model, no_progress)
    crops = build.test_crops(recipe, images)
    chosen = np.random.default_rng(0).permutation(len(images))[:SAMPLES]
    items = [crops[row] for row in chosen]
    pixels = torch.from_numpy(np.stack([item[0] for item in items]))  # (B, 3, H, W)
    labels = torch.tensor([item[1] for item in items])  # (B,)
    loss = cast(ProxyGMLLoss, build.build_loss(recipe, len(images.class_names)))
    curve: list[dict] = []

    def record(entry: dict, network: nn.Module) -> None:
        state = cast(dict, Run(folder).load_last())  # has been written before callbacks
        loss.load_state_dict(state["loss"])
        if recipe.start_ratio is not None:
            loss.links = scheduled_links(recipe, len(images.class_names), entry["epoch"] - 1)
        with torch.inference_mode():
            vectors = F.normalize(network.eval()(pixels), dim=1)
            curve.append({"epoch": entry["epoch"], "loss": entry["loss"]} | spread(vectors, labels, loss))

    run = train(recipe, folder, progress=False, callbacks=[record])
    return {"scores": summary(run)["scores"], "spread": curve}


def spread(vectors: Tensor, labels: Tensor, loss: ProxyGMLLoss) -> dict[str, float]:
    """The three measures of unit vectors (B, D) with labels (B,)."""
    proxies = F.normalize(loss.proxies.detach(), dim=2)  # (C, N, D)
    classes, per_class, _ = proxies.shape
    linked = link(vectors, loss.proxies.detach(), labels, loss.links, loss.settings.positive_bonus).linked  # (B, k)
    counts = torch.zeros(len(vectors), classes).scatter_add(1, linked // per_class, torch.ones_like(linked).float())
    cosines = mean_cosine(proxies) if per_class > 1 else torch.ones(classes)  # (C,)
    return {
        "samples": mean_cosine(vectors[None]).item(),
        "proxies": cosines.mean().item(),
        "classes": (counts > 0).sum(dim=1).float().mean().item(),
    }


def mean_cosine(vectors: Tensor) -> Tensor:
    """Mean cosine (G,) between two different unit vectors of each group (G, M, D)."""
    count = vectors.shape[1]
    return (vectors.sum(dim=1).square().sum(dim=1) - count) / (count * (count - 1))


def table(results: Results, dataset: str) -> Table:
    """The measures after the first epoch, a tenth of the epochs and all, as means over seeds."""
    lines = []
    for row, runs in results.rows.items():
        last = len(runs[0]["spread"])
        for epoch in dict.fromkeys((1, max(1, last // 10), last)):
            points = [run["spread"][epoch - 1] for run in runs]
            values = [f"{np.mean([point[name] for point in points]):.2f}" for name in MEASURES]
            recall = str(results.range(row, "recall@1")) if epoch == last else ""
            lines.append((row, str(epoch), *values, recall))
    return Table(("links", "epoch", *MEASURES.values(), "R@1 at the end"), tuple(lines))


def draw(results: Results, figure: Figure) -> None:
    for axis, (name, label) in zip(figure.subplots(1, 3), MEASURES.items(), strict=True):
        for row, runs in results.rows.items():
            heights = np.mean([[point[name] for point in run["spread"]] for run in runs], axis=0)
            axis.plot(range(1, len(heights) + 1), heights, marker=".", label=row)
        axis.set(xlabel="epoch", ylabel=label)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
    axis.legend()


SPREAD = Experiment(
    rows=lambda base: {name: base.changed(settings) for name, settings in ROWS.items()},
    table=table,
    draw=draw,
    measure=measure,
    remark="While few classes have separated, the N links of a sample to its own class outweigh the others: the loss "
    "falls although samples gather around one direction, and few classes are pushed apart in a step. The regularizer "
    "gathers the proxies of each class; then the links to other classes fall on a few whole classes, the nearest, and "
    "training with r = 0.05 begins to separate them. With r = 1, all classes are pushed apart from the first step.",
)
