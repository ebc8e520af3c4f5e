"""Pictures of a run: its curves, what its network retrieves, and a map of its space."""

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import shorten

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from proxygml.evaluation import neighbours
from proxygml.files import written_whole

RIGHT, WRONG, QUERY = "#1a9850", "#d73027", "#4d4d4d"


def draw_curves(entries: Sequence[dict], path: Path) -> None:
    """Loss and retrieval over the epochs of a log."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    epochs = [entry["epoch"] for entry in entries]
    for name, label in [("loss", "loss"), ("sample_loss", "on samples"), ("proxy_loss", "on proxies")]:
        if all(name in entry for entry in entries):
            left.plot(epochs, [entry[name] for entry in entries], marker=".", label=label)
    left.set(xlabel="epoch", ylabel="training loss", ylim=(0, None))
    left.legend()
    for split, label in [("held_out", "held-out training classes"), ("test", "test classes")]:
        scored = [entry for entry in entries if split in entry]
        first_recall = next(iter(scored[0][split])) if scored else ""
        for metric, name, style in [(first_recall, first_recall, "-"), ("map_at_r", "MAP@R", "--")] if scored else ():
            shares = [100 * entry[split][metric] for entry in scored]
            right.plot([entry["epoch"] for entry in scored], shares, style, marker=".", label=f"{name}, {label}")
    right.set(xlabel="epoch", ylabel="%")
    if right.lines:
        right.legend()
    _save(figure, path)


def draw_retrieval(
    open_image: Callable[[int], Image.Image], vectors: np.ndarray, labels: np.ndarray, path: Path
) -> None:
    """Twelve queries, each with its five nearest: green frames where the class is the same, red where it is not.

    Half of the queries are drawn at random, half from those whose nearest is wrong: look at the mistakes.
    """
    nearest, _ = neighbours(vectors, count=min(5, len(vectors) - 1))  # (M, K)
    failed = np.flatnonzero(labels[nearest[:, 0]] != labels)
    random = np.random.default_rng(0)
    queries = random.permutation(len(vectors))[: max(6, 12 - len(failed))]
    queries = np.concatenate([queries, random.permutation(np.setdiff1d(failed, queries))[: 12 - len(queries)]])
    rows = -(-len(queries) // 2)
    columns = 1 + nearest.shape[1]
    figure = Figure(figsize=(2 * columns * 0.95 + 0.6, rows + 0.5), layout="constrained")
    figure.suptitle(
        "Each query and its five nearest. Left: queries drawn at random. Right: queries whose nearest is wrong."
        if len(failed) >= 6
        else "Each query and its nearest; the last ones are the queries whose nearest is wrong, where there are any."
    )
    cells = figure.subplots(rows, 2 * columns + 1, squeeze=False)
    for axis in cells.ravel():
        axis.axis("off")
    for place, query in enumerate(queries):
        row, offset = place % rows, (place // rows) * (columns + 1)
        for column, index in enumerate([query, *nearest[query]]):
            axis = cells[row, offset + column]
            colour = QUERY if column == 0 else RIGHT if labels[index] == labels[query] else WRONG
            _show_framed(axis, open_image(int(index)), colour)
    _save(figure, path)


def draw_map(vectors: np.ndarray, labels: np.ndarray, class_names: Sequence[str], path: Path) -> None:
    """Up to a thousand embeddings in two dimensions (t-SNE), twelve classes in colour."""
    from sklearn.manifold import TSNE

    random = np.random.default_rng(0)
    coloured = random.permutation(np.unique(labels))[:12]
    members = np.flatnonzero(np.isin(labels, coloured))
    others = random.permutation(np.setdiff1d(np.arange(len(labels)), members))[: max(0, 1000 - len(members))]
    shown = np.concatenate([members, others])
    if len(shown) < 4:
        return
    vectors = np.pad(vectors, [(0, 0), (0, max(0, 2 - vectors.shape[1]))])  # a line is a flat plane
    perplexity = min(30, (len(shown) - 1) / 3)
    start = "pca" if np.ptp(vectors[shown], axis=0).any() else "random"  # equal vectors have no main direction
    points = TSNE(perplexity=perplexity, init=start, random_state=0).fit_transform(vectors[shown])  # (M, 2)

    figure = Figure(figsize=(8, 7.5), layout="constrained")
    axis = figure.subplots()
    grey = ~np.isin(labels[shown], coloured)
    axis.scatter(points[grey, 0], points[grey, 1], s=6, c="#d0d0d0", linewidths=0)
    colours = [f"C{number}" for number in (0, 1, 2, 3, 4, 5, 6, 8, 9)] + ["#000000", "#b8860b", "#00008b"]  # no grey
    groups = []
    for label, colour in zip(coloured, colours, strict=False):
        chosen = points[labels[shown] == label]
        groups.append(axis.scatter(chosen[:, 0], chosen[:, 1], s=22, color=colour, linewidths=0))
    names = [_readable(class_names[label]) for label in coloured]
    legend = figure.legend(groups, names, loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # $ is a letter of a name here, not the begin of a formula
    axis.set(title="Embeddings of classes never seen in training (t-SNE)", xticks=[], yticks=[])
    _save(figure, path)


def _readable(name: str) -> str:
    """A class name as it fits a legend, without what no typeface has."""
    return shorten("".join(letter if letter.isprintable() else "\ufffd" for letter in name), 45)


def _show_framed(axis: Axes, image: Image.Image, colour: str) -> None:
    with image:
        picture = image.convert("RGB")
        picture.thumbnail((128, 128))
    axis.axis("on")
    axis.imshow(np.asarray(picture))
    axis.set(xticks=[], yticks=[])
    for spine in axis.spines.values():
        spine.set(color=colour, linewidth=3)


def _save(figure: Figure, path: Path) -> None:
    with written_whole(path) as temporary:
        figure.savefig(temporary, dpi=110)
