"""Plots of a run: training curves, retrieval examples, and a t-SNE map of the embeddings."""

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import shorten

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image

from proxygml.evaluation import neighbors
from proxygml.files import atomic_write

RIGHT, WRONG, QUERY = "#1a9850", "#d73027", "#4d4d4d"


def draw_curves(entries: Sequence[dict], path: Path) -> None:
    """Loss and retrieval scores over the epochs of a log."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, label in [("loss", "loss"), ("sample_loss", "samples"), ("proxy_loss", "proxies")]:
        points = [(entry["epoch"], entry[name]) for entry in entries if name in entry]
        if points:
            left.plot(*zip(*points, strict=True), marker=".", label=label)
    left.set(xlabel="epoch", ylabel="training loss", ylim=(0, None))
    if left.lines:
        left.legend()
    for split, label in [("held_out", "held-out training classes"), ("test", "test classes")]:
        scored = [entry for entry in entries if split in entry]
        first_recall = next(iter(scored[0][split])) if scored else ""
        for metric, name, style in [(first_recall, first_recall, "-"), ("map_at_r", "MAP@R", "--")] if scored else ():
            values = [100 * entry[split][metric] for entry in scored]
            right.plot([entry["epoch"] for entry in scored], values, style, marker=".", label=f"{name}, {label}")
    right.set(xlabel="epoch", ylabel="%")
    if right.lines:
        right.legend()
    for axis in (left, right):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    _save(figure, path)


def draw_retrieval(
    open_image: Callable[[int], Image.Image],
    vectors: np.ndarray,
    labels: np.ndarray,
    path: Path,
    *,
    queries: np.ndarray | None = None,
) -> None:
    """Twelve queries with their five nearest neighbors, framed green if the class matches and red if not.

    Half of the queries are random, half have a wrong nearest neighbor. With `queries` (M,), these images are searched
    for among the others.
    """
    asked = np.arange(len(vectors)) if queries is None else np.flatnonzero(queries)  # (Q,)
    gallery = np.arange(len(vectors)) if queries is None else np.flatnonzero(~queries)  # (G,)
    count = min(5, len(gallery) - (queries is None))
    nearest, _ = neighbors(vectors[asked], None if queries is None else vectors[gallery], count=count)
    nearest = gallery[nearest]  # (Q, K)
    failed = np.flatnonzero(labels[nearest[:, 0]] != labels[asked])
    rng = np.random.default_rng(0)
    chosen = rng.permutation(len(asked))[: max(6, 12 - len(failed))]
    chosen = np.concatenate([chosen, rng.permutation(np.setdiff1d(failed, chosen))[: 12 - len(chosen)]])
    rows = -(-len(chosen) // 2)
    columns = 1 + nearest.shape[1]
    figure = Figure(figsize=(2 * columns * 0.95 + 0.6, rows + 0.5), layout="constrained")
    figure.suptitle(
        "Queries and their five nearest neighbors. Left: random queries. Right: wrong nearest neighbor."
        if len(failed) >= 6
        else "Queries and their nearest neighbors; queries with a wrong nearest neighbor come last."
    )
    cells = figure.subplots(rows, 2 * columns + 1, squeeze=False)
    for axis in cells.ravel():
        axis.axis("off")
    for number, query in enumerate(chosen):
        row, offset = number % rows, (number // rows) * (columns + 1)
        for column, index in enumerate([asked[query], *nearest[query]]):
            color = QUERY if column == 0 else RIGHT if labels[index] == labels[asked[query]] else WRONG
            _show_framed(cells[row, offset + column], open_image(int(index)), color)
    _save(figure, path)


def draw_map(vectors: np.ndarray, labels: np.ndarray, class_names: Sequence[str], path: Path) -> None:
    """t-SNE of up to a thousand embeddings, twelve classes in color."""
    from sklearn.manifold import TSNE

    rng = np.random.default_rng(0)
    colored = rng.permutation(np.unique(labels))[:12]
    members = np.flatnonzero(np.isin(labels, colored))
    others = rng.permutation(np.setdiff1d(np.arange(len(labels)), members))[: max(0, 1000 - len(members))]
    shown = np.concatenate([members, others])
    if len(shown) < 4:
        return
    vectors = np.pad(vectors, [(0, 0), (0, max(0, 2 - vectors.shape[1]))])  # PCA needs two dimensions
    perplexity = min(30, (len(shown) - 1) / 3)
    init = "pca" if np.ptp(vectors[shown], axis=0).any() else "random"  # PCA fails on equal vectors
    points = TSNE(perplexity=perplexity, init=init, random_state=0).fit_transform(vectors[shown])  # (M, 2)

    figure = Figure(figsize=(8, 7.5), layout="constrained")
    axis = figure.subplots()
    gray = ~np.isin(labels[shown], colored)
    axis.scatter(points[gray, 0], points[gray, 1], s=6, c="#d0d0d0", linewidths=0)
    colors = [f"C{number}" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9)] + ["#000000", "#b8860b", "#00008b"]  # no gray
    groups = []
    for label, color in zip(colored, colors, strict=False):
        chosen = points[labels[shown] == label]
        groups.append(axis.scatter(chosen[:, 0], chosen[:, 1], s=22, color=color, linewidths=0))
    names = [_printable(class_names[label]) for label in colored]
    legend = figure.legend(groups, names, loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ in a class name does not start a formula
    axis.set(title="Embeddings of test images (t-SNE)", xticks=[], yticks=[])
    _save(figure, path)


def _printable(name: str) -> str:
    """A class name for the legend: at most 45 characters, unprintable ones replaced."""
    return shorten("".join(character if character.isprintable() else "\ufffd" for character in name), 45)


def _show_framed(axis: Axes, image: Image.Image, color: str) -> None:
    with image:
        thumbnail = image.convert("RGB")
        thumbnail.thumbnail((128, 128))
    axis.axis("on")
    axis.imshow(np.asarray(thumbnail))
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set(color=color, linewidth=3)


def _save(figure: Figure, path: Path) -> None:
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110)
