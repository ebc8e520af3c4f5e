"""Plots of a run: training curves, neighbors, also before and after training, and a t-SNE map of the embeddings."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from PIL import Image

from proxygml.data import open_image
from proxygml.display import counted
from proxygml.files import atomic_write
from proxygml.fonts import drawable, fit

RIGHT, WRONG, QUERY = "#1a9850", "#d73027", "#4d4d4d"
SIDE, ROW, TITLE = 0.9, 1.22, 0.4  # of an image, a row with names and the title, in inches
NAME_SIZE = 6.5  # in points


def draw_curves(entries: Sequence[dict], path: Path) -> None:
    """Loss and, if there are any, retrieval scores over the epochs of a log; nothing without a trained epoch."""
    if not any("loss" in entry for entry in entries):
        return
    scored = {split: [entry for entry in entries if split in entry] for split in ("held_out", "test")}
    panels = 1 + any(scored.values())
    figure = Figure(figsize=(4.5 * panels, 3.6), layout="constrained")
    axes = figure.subplots(1, panels, squeeze=False)[0]
    for name, label in [("loss", "loss"), ("sample_loss", "samples"), ("proxy_loss", "proxies")]:
        points = [(entry["epoch"], entry[name]) for entry in entries if name in entry]
        if points:
            axes[0].plot(*zip(*points, strict=True), marker=".", label=label)
    axes[0].set(ylabel="training loss", ylim=(0, None))
    for split, label in [("held_out", "held-out training classes"), ("test", "test classes")]:
        first_recall = next(iter(scored[split][0][split])) if scored[split] else ""
        for metric, name, style in (
            [(first_recall, first_recall, "-"), ("map_at_r", "MAP@R", "--")] if first_recall else ()
        ):
            points = [(entry["epoch"], 100 * entry[split][metric]) for entry in scored[split]]
            axes[1].plot(*zip(*points, strict=True), style, marker=".", label=f"{name}, {label}")
            axes[1].set(ylabel="%")
    for axis in axes:
        axis.set(xlabel="epoch")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.legend()
    _save(figure, path)


class Sheet:
    """A figure of images with frames and class names; one unit is an inch, as a column is wide."""

    def __init__(
        self,
        open_image: Callable[[int], Image.Image],
        labels: np.ndarray,
        class_names: Sequence[str],
        shown: np.ndarray,
    ) -> None:
        self.open_image, self.labels = open_image, labels
        present = np.unique(labels[shown])
        names, self.families = drawable([class_names[label] for label in present])
        lines = [fit(name, NAME_SIZE, 68 * SIDE, self.families) for name in names]
        self.names = dict(zip(present.tolist(), lines, strict=True))
        self.figure = Figure()
        self.axis = self.figure.add_axes((0, 0, 1, 1))
        self.axis.axis("off")

    def add(self, index: int, query: int, x: float, y: float) -> None:
        """Image `index` with its top left corner at (x, y), framed green if its class is the query's and red if not."""
        with self.open_image(int(index)) as image:
            thumbnail = image.convert("RGB")
            thumbnail.thumbnail((128, 128))
        width, height = (SIDE * length / max(thumbnail.size) for length in thumbnail.size)
        left, top = x + (1 - width) / 2, y + SIDE - height
        pixels = np.asarray(thumbnail)
        self.axis.imshow(pixels, extent=(left, left + width, top + height, top), aspect="auto")
        label = int(self.labels[index])
        color = QUERY if index == query else RIGHT if label == self.labels[query] else WRONG
        self.axis.add_patch(Rectangle((left, top), width, height, fill=False, color=color, linewidth=3))
        self.write(x + 0.5, y + (SIDE + ROW) / 2, self.names[label], NAME_SIZE)

    def write(self, x: float, y: float, text: str, size: float = 9, rotation: float = 0) -> None:
        """A text with its center at (x, y)."""
        options: dict[str, Any] = {"family": self.families, "ha": "center", "va": "center", "parse_math": False}
        self.axis.text(x, y, text, size=size, rotation=rotation, **options)

    def save(self, path: Path, width: float, height: float, title: str) -> None:
        """Write the figure with a title above."""
        self.figure.set_size_inches(width, height + TITLE)
        self.axis.set(xlim=(0, width), ylim=(height, -TITLE))
        self.write(width / 2, -TITLE / 2, title, size=11)
        _save(self.figure, path)


def draw_retrieval(
    open_image: Callable[[int], Image.Image],
    nearest: np.ndarray,
    labels: np.ndarray,
    class_names: Sequence[str],
    path: Path,
    *,
    queries: np.ndarray | None = None,
) -> None:
    """Twelve queries with their nearest neighbors, framed green if the class matches and red if not.

    `nearest` (Q, K) are indices of images (M,), nearest first: for every image or, with `queries` (M,), for these.
    Half of the queries are random, half have a wrong nearest neighbor.
    """
    asked = np.arange(len(labels)) if queries is None else np.flatnonzero(queries)  # (Q,)
    failed = np.flatnonzero(labels[nearest[:, 0]] != labels[asked])
    rng = np.random.default_rng(0)
    chosen = rng.permutation(len(asked))[: max(6, 12 - len(failed))]
    chosen = np.concatenate([chosen, rng.permutation(np.setdiff1d(failed, chosen))[: 12 - len(chosen)]])
    rows, columns = -(-len(chosen) // 2), nearest.shape[1] + 1.2
    sheet = Sheet(open_image, labels, class_names, np.append(asked[chosen], nearest[chosen]))
    for number, query in enumerate(chosen):
        x, y = number // rows * (columns + 0.3), number % rows * ROW
        sheet.add(asked[query], asked[query], x, y)
        for column, index in enumerate(nearest[query]):
            sheet.add(index, asked[query], x + 1.2 + column, y)
    title = (
        "Queries and their five nearest neighbors. Left: random queries. Right: wrong nearest neighbor."
        if len(failed) >= 6
        else "Queries and their nearest neighbors; queries with a wrong nearest neighbor come last."
    )
    sheet.save(path, 2 * columns + 0.3, rows * ROW, title)


def draw_before_after(
    open_image: Callable[[int], Image.Image],
    before: np.ndarray,
    after: np.ndarray,
    labels: np.ndarray,
    class_names: Sequence[str],
    path: Path,
    *,
    queries: np.ndarray | None = None,
) -> None:
    """Eight queries with their nearest neighbors (Q, K) before and after training, as in `draw_retrieval`.

    Four of them have a wrong nearest neighbor only before training, four only after it; if there are fewer, others are
    shown. The title counts both.
    """
    asked = np.arange(len(labels)) if queries is None else np.flatnonzero(queries)  # (Q,)
    right_before, right_after = (labels[nearest[:, 0]] == labels[asked] for nearest in (before, after))
    mended, broken = right_after & ~right_before, right_before & ~right_after  # (Q,)
    rng = np.random.default_rng(0)
    kinds = {"mended": mended, "broken": broken, "unchanged": ~(mended | broken)}
    drawn = {kind: rng.permutation(np.flatnonzero(members)) for kind, members in kinds.items()}
    chosen = [(kind, query) for kind in ("mended", "broken") for query in drawn[kind][:4]]
    chosen += [("unchanged", query) for query in drawn["unchanged"][: 8 - len(chosen)]]
    rows, columns, height = -(-len(chosen) // 2), after.shape[1] + 1.3, 2 * ROW + 0.15
    indices = np.array([query for _, query in chosen])
    sheet = Sheet(open_image, labels, class_names, np.concatenate([asked[indices], *before[indices], *after[indices]]))
    for number, (kind, query) in enumerate(chosen):
        x, y = number // rows * (columns + 0.3), number % rows * height
        sheet.add(asked[query], asked[query], x, y)
        sheet.write(x + 0.5, y + 1.4 * ROW, kind)
        for row, (when, nearest) in enumerate([("before", before), ("after", after)]):
            sheet.write(x + 1.15, y + row * ROW + SIDE / 2, when, rotation=90)
            for column, index in enumerate(nearest[query]):
                sheet.add(index, asked[query], x + 1.3 + column, y + row * ROW)
    counts = f"training mended the nearest neighbor of {mended.sum():,} and broke that of {broken.sum():,}"
    title = f"Of {counted(len(asked), 'query')}, {counts}. Rows: neighbors before and after training."
    sheet.save(path, 2 * columns + 0.3, rows * height, title)


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
    names, families = drawable([class_names[label] for label in colored])
    lines = [fit(name, 8, 250, families) for name in names]
    style = {"family": families, "size": 8}
    legend = figure.legend(groups, lines, loc="outside lower center", ncols=2, prop=style, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ in a class name does not start a formula
    axis.set(title="Embeddings of test images (t-SNE)", xticks=[], yticks=[])
    _save(figure, path)


def draw_separation(
    known: np.ndarray, unknown: np.ndarray, probability: np.ndarray, right: np.ndarray, path: Path
) -> None:
    """The ROC of the scores of known and unknown images (M,), and how often answers (M,) of a probability are right."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    left, second = figure.subplots(1, 2)
    thresholds = np.unique(np.concatenate([known, unknown]))  # (T,)
    accepted = 1 - np.searchsorted(np.sort(unknown), thresholds) / len(unknown)  # (T,)
    refused = np.searchsorted(np.sort(known), thresholds) / len(known)  # (T,)
    left.plot(100 * accepted, 100 * (1 - refused), color=RIGHT)
    left.plot([0, 100], [0, 100], ":", color=QUERY)
    left.set(xlabel="unknown images accepted, %", ylabel="known images accepted, %", title="Known or unknown (ROC)")
    bins = np.minimum((10 * probability).astype(int), 9)  # (M,)
    counts = np.bincount(bins, minlength=10)  # (10,)
    means, hits = (np.bincount(bins, values, 10) / np.maximum(counts, 1) for values in (probability, right))
    second.scatter(100 * means[counts > 0], 100 * hits[counts > 0], 10 + 400 * counts[counts > 0] / len(bins), RIGHT)
    second.plot([0, 100], [0, 100], ":", color=QUERY)
    second.set(xlabel="probability of the answer, %", ylabel="answers that are right, %", title="Reliability")
    _save(figure, path)


def draw_sheet(rows: Sequence[tuple[str, Sequence[Path | None]]], path: Path) -> None:
    """Rows of image files, each with a title on the left; nothing if there are no files."""
    found = [(title, own) for title, files in rows if (own := [file for file in files if file is not None])]
    if not found:
        return
    titles, families = drawable([line for title, _ in found for line in title.split("\n")])
    lines = iter(titles)
    columns = max(len(files) for _, files in found)
    figure = Figure(figsize=(2.2 + 0.95 * columns, 0.3 + len(found)), layout="constrained")
    cells = figure.subplots(len(found), columns + 1, squeeze=False, width_ratios=[2.2] + [0.95] * columns)
    for axis in cells.ravel():
        axis.axis("off")
    for (first, *others), (title, files) in zip(cells, found, strict=True):
        text = "\n".join(next(lines)[:32] for _ in title.split("\n"))
        options: dict[str, Any] = {"family": families, "va": "center", "size": "small", "parse_math": False}
        first.text(0, 0.5, text, transform=first.transAxes, **options)
        for axis, file in zip(others, files, strict=False):
            with suppress(OSError, ValueError), open_image(file) as image:  # a damaged file leaves a gap
                thumbnail = image.convert("RGB")
                thumbnail.thumbnail((128, 128))
                axis.imshow(np.asarray(thumbnail))
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    with atomic_write(path) as temporary:
        figure.savefig(temporary, dpi=110)
