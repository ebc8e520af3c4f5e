"""One sample, its linked proxies and the resulting class probabilities, before and after training."""

import math
from pathlib import Path
from textwrap import shorten
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from proxygml.backbones import load_pretrained
from proxygml.data import ImageList
from proxygml.losses.proxygml.chunked import link
from proxygml.losses.proxygml.module import ProxyGMLLoss
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import Claims, Results
from proxygml.paper.tables import Table
from proxygml.training import build
from proxygml.training.fabric import start_fabric
from proxygml.training.recipe import Recipe
from proxygml.training.start import train

SHOWN = 10  # classes of the subgraph that are drawn, those with the highest scores
SAMPLE = 0  # the first training image
OWN, OTHER = "#1a9850", "#d73027"  # colors


def measure(recipe: Recipe, folder: Path) -> dict:
    """The subgraph of a sample before training and after it."""
    start_fabric(recipe)
    images, _ = build.load_images(recipe)
    model = build.build_model(recipe)
    if recipe.weights is not None:
        load_pretrained(model.trunk, recipe.weights)
    loss = cast(ProxyGMLLoss, build.build_loss(recipe, len(images.class_names)))
    before = subgraph(model, loss, recipe, images)
    best = train(recipe, folder, progress=False).load_best()
    model.load_state_dict(best["model"])
    loss.load_state_dict(best["loss"])
    return {"before": before, "after": subgraph(model, loss, recipe, images), "sample": str(images.paths[SAMPLE])}


@torch.no_grad()
def subgraph(model: nn.Module, loss: ProxyGMLLoss, recipe: Recipe, images: ImageList) -> dict[str, list]:
    """Positions of the linked proxies relative to the sample, and which of them are of its class.

    The distance of a point from the origin is its true angle to the sample, in degrees; its direction is that of the
    two principal components of what is left of the linked proxies without the sample's own direction.
    """
    image, label = build.test_crops(recipe, images)[SAMPLE]
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
    link_class = linked[0] // loss.proxies.shape[1]  # (k,)
    return {
        "places": [[round(x, 2) for x in place] for place in places.tolist()],
        "own": (link_class == label).tolist(),
        "classes": _propagated(sample[0], loss, linked[0], images.class_names, label),
    }


def _propagated(sample: Tensor, loss: ProxyGMLLoss, linked: Tensor, names: tuple[str, ...], label: int) -> list[dict]:
    """Eq. 2 to 6 for one sample (D,) with links (k,): S, I, Z and P of every class in its subgraph, highest Z first."""
    similarity = F.normalize(loss.proxies, dim=-1) @ sample  # (C, N), Eq. 2: S
    mask = torch.zeros_like(similarity).flatten().index_fill(0, linked, 1).view_as(similarity)  # (C, N): I
    scores = (similarity * mask).sum(dim=1)  # (C,), Eq. 5: Z
    active = mask.sum(dim=1) > 0  # (C,): M
    probability = (loss.settings.scale * scores).masked_fill(~active, -math.inf).softmax(dim=0)  # (C,), Eq. 6: P
    order = scores.masked_fill(~active, -math.inf).argsort(descending=True)[: int(active.sum())]
    return [
        {
            "name": names[number],
            "own": number == label,
            "similarity": [round(value, 3) for value in similarity[number].tolist()],
            "linked": mask[number].bool().tolist(),
            "score": round(scores[number].item(), 3),
            "probability": round(probability[number].item(), 4),
        }
        for number in order.tolist()
    ]


def table(results: Results, dataset: str) -> Table:
    rows = []
    for when in ("before", "after"):
        for kind, own in (("own class", True), ("other classes", False)):
            angles = _angles(results, when, own)
            mean = f"{np.mean(angles):.1f}" if angles else "-"
            number = f"{len(angles) / len(results.rows['proxygml']):.0f}"
            rows.append((f"{when} training, proxies of {kind}", number, mean))
    return Table(("linked to the sample", "number", "mean angle, degrees"), tuple(rows))


def _angles(results: Results, when: str, own: bool) -> list[float]:
    """Angles from the sample to linked proxies of its class, or of other classes, in all runs."""
    return [
        math.hypot(*place)
        for run in results.rows["proxygml"]
        for place, is_own in zip(run[when]["places"], run[when]["own"], strict=True)
        if is_own == own
    ]


def draw(results: Results, figure: Figure) -> None:
    """The subgraph by angles (Figure 3), and from similarities to scores and probabilities (Figure 2)."""
    run = results.rows["proxygml"][0]
    farthest = 1.1 * max(math.hypot(*place) for when in ("before", "after") for place in run[when]["places"])
    for row, when in zip(figure.subplots(2, 3, width_ratios=(3, 4, 3)), ("before", "after"), strict=True):
        _draw_angles(row[0], run[when], farthest)
        row[0].set(title=f"{when} training: the subgraph")
        _draw_similarity(row[1], run[when]["classes"][:SHOWN])
        _draw_scores(row[2], run[when]["classes"][:SHOWN])
    figure.legend(*row[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def _draw_angles(axis: Axes, results: dict, farthest: float) -> None:
    places, own = np.array(results["places"]), np.array(results["own"])
    for kind, label, color in ((own, "own class", OWN), (~own, "other classes", OTHER)):
        for x, y in places[kind]:
            axis.plot([0, x], [0, y], color=color, linewidth=0.4)
        axis.scatter(places[kind][:, 0], places[kind][:, 1], color=color, s=22, label=f"proxies of {label}")
    axis.scatter(0, 0, marker="*", s=180, color="black", label="the sample", zorder=3)
    axis.set(aspect="equal", xlabel="angle to the sample, degrees")
    axis.set(xlim=(-farthest, farthest), ylim=(-farthest, farthest))


def _draw_similarity(axis: Axes, classes: list[dict]) -> None:
    """S of the proxies (columns) of classes (rows), with a frame around those in the set I."""
    axis.imshow([one["similarity"] for one in classes], cmap="RdBu_r", vmin=-1, vmax=1, aspect="auto")
    for row, one in enumerate(classes):
        for column in np.flatnonzero(one["linked"]):
            axis.add_patch(Rectangle((column - 0.45, row - 0.45), 0.9, 0.9, fill=False, linewidth=1.2))
    axis.set_yticks(range(len(classes)), [shorten(one["name"], 24, placeholder="…") for one in classes], fontsize=6)
    axis.set(xlabel="proxies of the class", title="S, links framed")


def _draw_scores(axis: Axes, classes: list[dict]) -> None:
    for number, one in enumerate(classes):
        axis.barh(number, one["score"], color=OWN if one["own"] else OTHER)
        axis.text(max(one["score"], 0), number, f" P {one['probability']:.2f}", va="center", fontsize=7)
    axis.set(yticks=[], xlabel="Z, the sum of links", title="Z, and P by mask softmax")
    axis.margins(x=0.3)
    axis.invert_yaxis()


def claims(results: Results, dataset: str) -> Claims:
    def judged(own: bool) -> str:
        before, after = (float(np.mean(_angles(results, when, own))) for when in ("before", "after"))
        verdict = "holds" if (after < before) == own else "**does not hold**"
        return f"{verdict} ({before:.0f} degrees before, {after:.0f} after)"

    return {
        "training pulls the positive proxies to the sample": {"mean angle": judged(own=True)},
        "and pushes the negative ones away (measured on the nearest, which are linked then)": {
            "mean angle": judged(own=False)
        },
    }


ILLUSTRATION = Experiment(
    rows=lambda base: {"proxygml": base.changed({"tested_epochs": (), "held_out": 0.0, "test": False})},
    table=table,
    draw=draw,
    claims=claims,
    measure=measure,
    height=7.0,
)
