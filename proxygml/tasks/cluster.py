"""Sorts images into clusters, and writes them as folders of links, a table to train on, and a contact sheet.

Axes: M images, D embedding.
"""

import csv
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from proxygml.display import counted
from proxygml.embeddings import Embeddings
from proxygml.evaluation.clustering import kmeans
from proxygml.evaluation.validation import as_matrix
from proxygml.files import atomic_write, new_folder
from proxygml.plots import draw_sheet

MIN_SIZE = 5  # images in a cluster
MAX_DIM = 50  # principal components for HDBSCAN, whose cost grows with the dimension
SHEET = 20, 10  # clusters on the contact sheet, and images of each
UNCLUSTERED = "unclustered"


def find_clusters(
    vectors: np.ndarray,
    clusters: int | None = None,
    *,
    min_size: int = MIN_SIZE,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> np.ndarray:
    """The cluster of each of vectors (M, D), the largest first; -1: in none.

    k-means makes a given number of clusters. Without a number, HDBSCAN finds dense groups of at least `min_size`, and
    leaves out what lies between them.

    >>> import numpy as np
    >>> find_clusters(np.array([[0.0], [0.1], [5.0], [5.1], [5.2]]), clusters=2).tolist()
    [1, 1, 0, 0, 0]
    """
    if len(vectors) < 2:
        raise ValueError(f"expected 2 or more images to cluster, got {len(vectors)}")
    if clusters is not None and not 2 <= clusters <= len(vectors):
        raise ValueError(f"expected 2 to {len(vectors):,} clusters, the number of images, got {clusters:,}")
    points = as_matrix(vectors, "vectors").numpy()  # (M, D)
    if (points == points[0]).all():
        raise ValueError(f"expected vectors that differ, got {len(points):,} equal ones: there is nothing to cluster")
    if clusters is not None:
        found, _ = kmeans(points, clusters, seed=seed, progress=progress)
    else:
        found = _dense_groups(points, min_size)
    sizes = np.bincount(found[found >= 0])
    order = np.argsort(-sizes, kind="stable")
    rank = np.empty(len(sizes) + 1, np.int64)
    rank[order] = np.arange(len(sizes))
    rank[-1] = -1
    return rank[found]


def _dense_groups(points: np.ndarray, min_size: int) -> np.ndarray:
    from sklearn.cluster import HDBSCAN
    from sklearn.decomposition import PCA

    if not 2 <= min_size <= len(points):
        raise ValueError(f"expected a min_size from 2 to {len(points):,}, the number of images, got {min_size:,}")
    if points.shape[1] > MAX_DIM and len(points) > MAX_DIM:
        points = PCA(MAX_DIM, random_state=0).fit_transform(points)
    # The leaves of its tree are small and pure; its other choice may put nearly all images into one cluster.
    found = HDBSCAN(min_cluster_size=min_size, min_samples=1, cluster_selection_method="leaf", copy=True)
    return found.fit_predict(points)


def agreement(labels: np.ndarray, clusters: np.ndarray) -> dict[str, float]:
    """NMI, AMI and B-cubed F1 of clusters (M,) with labels (M,); an image in no cluster counts as one of its own."""
    from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

    alone = clusters < 0
    clusters = np.where(alone, clusters.max() + np.cumsum(alone), clusters)
    pairs = np.unique(np.stack([labels, clusters]), axis=1, return_inverse=True)[1].ravel()  # (M,)
    same_both, same_cluster, same_label = (_group_sizes(groups) for groups in (pairs, clusters, labels))
    precision, recall = np.mean(same_both / same_cluster), np.mean(same_both / same_label)
    return {
        "nmi": float(normalized_mutual_info_score(labels, clusters)),
        "ami": float(adjusted_mutual_info_score(labels, clusters)),
        "b_cubed": float(2 * precision * recall / (precision + recall)),
    }


def _group_sizes(groups: np.ndarray) -> np.ndarray:
    """The size of each one's group: (M,) -> (M,)."""
    _, places, counts = np.unique(groups, return_inverse=True, return_counts=True)
    return counts[places]


def write_clusters(folder: Path, items: Embeddings, clusters: np.ndarray, files: Sequence[Path | None]) -> None:
    """Write relative links to the files (M,), clusters.csv and clusters.png to a new folder.

    In the table, a path is that of its link; without a file it is that of the item.
    """
    width = max(3, len(str(clusters.max())))
    names = [UNCLUSTERED if number < 0 else f"cluster-{number + 1:0{width}}" for number in clusters.tolist()]
    paths = [str(path) for path in items.paths]
    count, length = SHEET
    shown = []
    for number in range(min(count, clusters.max() + 1)):
        members = np.flatnonzero(clusters == number)
        central = [files[row] for row in most_central(items.vectors, members)[:length]]
        shown.append((f"{names[members[0]]}\n{counted(len(members), 'image')}", central))
    with new_folder(folder) as draft:
        for row, (name, file) in enumerate(zip(names, files, strict=True)):
            if file is not None:
                link = _free_name(draft / name / file.name)
                link.parent.mkdir(exist_ok=True)
                link.symlink_to(os.path.relpath(file, (folder / name).resolve()))
                paths[row] = link.relative_to(draft).as_posix()
        with atomic_write(draft / "clusters.csv") as path, path.open("w", newline="", encoding="utf-8") as rows:
            table = csv.writer(rows, lineterminator="\n")
            table.writerow(("path", "label", "was"))
            for row in np.argsort(clusters, kind="stable"):
                if clusters[row] >= 0:
                    table.writerow((paths[row], names[row], items.class_name(items.labels[row])))
        draw_sheet(shown, draft / "clusters.png")


def most_central(vectors: np.ndarray, members: np.ndarray) -> Sequence[int]:
    """Members of a cluster by their distance to its mean."""
    own = vectors[members].astype(np.float64)
    return members[np.argsort(np.linalg.norm(own - own.mean(axis=0), axis=1), kind="stable")].tolist()


def _free_name(path: Path) -> Path:
    """The path, with a number if there is such a link already: photos of several folders may have the same name."""
    number, free = 1, path
    while free.is_symlink():
        number, free = number + 1, path.with_name(f"{path.stem}-{number + 1}{path.suffix}")
    return free
