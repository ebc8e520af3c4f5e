"""One sample and the proxies it is linked to, before and after training."""

import math
from pathlib import Path
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import nn

from proxygml import ingredients, training
from proxygml.datasets import ImageList
from proxygml.experiments.found import Claims, Found
from proxygml.experiments.tables import Table
from proxygml.losses.proxygml.chunked import link
from proxygml.losses.proxygml.module import ProxyGMLLoss
from proxygml.recipes import Recipe

IN_THE_PAPER = "Figure 3"
SAMPLE = 0  # the first training image


def arms(base: Recipe) -> dict[str, Recipe]:
    return {"proxygml": base.changed({"tested_epochs": (), "held_out": 0.0, "test": False})}


def measure(recipe: Recipe, folder: Path) -> dict:
    """The subgraph of a sample before training and after it."""
    ingredients.start_fabric(recipe)
    images, _ = ingredients.load_images(recipe)
    model = ingredients.build_model(recipe)
    if recipe.weights is not None:
        ingredients.load_pretrained(model, recipe)
    loss = cast(ProxyGMLLoss, ingredients.build_loss(recipe, len(images.class_names)))
    before = subgraph(model, loss, recipe, images)
    best = training.train(recipe, folder).load_best()
    model.load_state_dict(best["model"])
    loss.load_state_dict(best["loss"])
    return {"before": before, "after": subgraph(model, loss, recipe, images), "sample": str(images.paths[SAMPLE])}


@torch.no_grad()
def subgraph(model: nn.Module, loss: ProxyGMLLoss, recipe: Recipe, images: ImageList) -> dict[str, list]:
    """Where the proxies lie that the sample is linked to, seen from it, and which are of its own class.

    The distance of a point from the origin is its true angle to the sample, in degrees; its direction is that of the
    two principal components of what is left of the linked proxies without the sample's own direction.
    """
    image, label = ingredients.test_crops(recipe, images)[SAMPLE]
    sample = F.normalize(model.eval()(torch.from_numpy(image)[None]), dim=-1)  # (1, D)
    linked = link(
        sample, loss.proxies, torch.tensor([label]), loss.links, loss.settings.positive_bonus
    ).linked  # (1, k)
    chosen = F.normalize(loss.proxies.flatten(0, 1)[linked[0]], dim=-1)  # (k, D)
    cosines = (chosen @ sample[0]).clamp(-1, 1)  # (k,)
    aside = chosen - cosines[:, None] * sample  # (k, D)
    _, _, axes = torch.linalg.svd(aside - aside.mean(dim=0), full_matrices=False)
    flat = F.normalize(aside @ axes[:2].T, dim=-1)  # (k, 2)
    places = flat * torch.rad2deg(cosines.acos())[:, None]  # (k, 2)
    own = linked[0] // loss.proxies.shape[1] == label  # (k,)
    return {"places": [[round(x, 2) for x in place] for place in places.tolist()], "own": own.tolist()}


def table(found: Found, dataset: str) -> Table:
    rows = []
    for when in ("before", "after"):
        for kind, own in (("own class", True), ("other classes", False)):
            angles = _angles(found, when, own)
            mean = f"{np.mean(angles):.1f}" if angles else "-"
            number = f"{len(angles) / len(found.arms['proxygml']):.0f}"
            rows.append((f"{when} training, proxies of {kind}", number, mean))
    return Table(("linked to the sample", "number", "mean angle, degrees"), tuple(rows))


def _angles(found: Found, when: str, own: bool) -> list[float]:
    """From the sample to the proxies of its own class, or of others, that it is linked to, in all runs."""
    return [
        math.hypot(*place)
        for run in found.arms["proxygml"]
        for place, is_own in zip(run[when]["places"], run[when]["own"], strict=True)
        if is_own == own
    ]


def draw(found: Found, figure: Figure) -> None:
    run = found.arms["proxygml"][0]
    farthest = max(math.hypot(*place) for when in ("before", "after") for place in run[when]["places"])
    for axis, when in zip(figure.subplots(1, 2, sharex=True, sharey=True), ("before", "after"), strict=True):
        places, own = np.array(run[when]["places"]), np.array(run[when]["own"])
        for kind, label, colour in ((own, "own class", "#1a9850"), (~own, "other classes", "#d73027")):
            for x, y in places[kind]:
                axis.plot([0, x], [0, y], color=colour, linewidth=0.4)
            axis.scatter(*places[kind].T, color=colour, s=22, label=f"proxies of {label}")
        axis.scatter(0, 0, marker="*", s=180, color="black", label="the sample", zorder=3)
        axis.set(title=f"{when} training", aspect="equal", xlabel="angle to the sample, degrees")
        axis.set(xlim=(-1.1 * farthest, 1.1 * farthest), ylim=(-1.1 * farthest, 1.1 * farthest))
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=3)


def claims(found: Found, dataset: str) -> Claims:
    def judged(own: bool) -> str:
        before, after = (float(np.mean(_angles(found, when, own))) for when in ("before", "after"))
        verdict = "holds" if (after < before) == own else "**does not hold**"
        return f"{verdict} (mean angle {before:.0f} degrees before, {after:.0f} after)"

    return {
        "training pulls the positive proxies to the sample": {"angle": judged(own=True)},
        "and pushes the negative ones away": {
            "angle": f"{judged(own=False)}, of the nearest ones, which are those then linked"
        },
    }
