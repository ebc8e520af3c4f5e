"""Batches of an epoch as image indices; they depend only on (seed, epoch)."""

import math
from functools import cache

import numpy as np

from proxygml.display import counted

RUN, WINDOW = 1024, 8  # consecutive images that are read together, and runs that are mixed


def draw_batches(
    sampler: str,
    labels: np.ndarray,
    batch_size: int,
    images_per_class: int,
    *,
    class_distances: np.ndarray | None = None,
    structured_fraction: float = 0.75,
    seed: int,
    epoch: int,
) -> list[np.ndarray]:
    """The batches of an epoch by a sampler's name: labels (M,) -> image indices.

    "neighboring" needs `class_distances` (C, C); without it, batches are "balanced".
    """
    rng = {"seed": seed, "epoch": epoch}
    if sampler == "shuffled":
        return shuffled(len(labels), batch_size, **rng)
    if sampler == "streamed":
        return streamed(len(labels), batch_size, **rng)
    if sampler == "two streams":
        return two_streams(labels, batch_size, images_per_class, fraction=structured_fraction, **rng)
    if sampler == "neighboring" and class_distances is not None:
        return neighboring(labels, batch_size, images_per_class, class_distances, **rng)
    return balanced(labels, batch_size, images_per_class, **rng)


def shuffled(images: int, batch_size: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Every image once; the last batch may be smaller.

    A single last image would have no batch statistics, so it joins the batch before.
    """
    return _split(np.random.default_rng((seed, epoch)).permutation(images), batch_size)


def streamed(images: int, batch_size: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """Every image once, as `shuffled`, but almost in the order of the files, for tar files on a distant disk.

    Runs of RUN consecutive images are shuffled, then the images within each WINDOW of runs.
    """
    rng = np.random.default_rng((seed, epoch))
    runs = np.split(np.arange(images), range(RUN, images, RUN))
    order = [runs[run] for run in rng.permutation(len(runs))]
    windows = [np.concatenate(order[start : start + WINDOW]) for start in range(0, len(order), WINDOW)]
    return _split(np.concatenate([rng.permutation(window) for window in windows]), batch_size)


def _split(order: np.ndarray, batch_size: int) -> list[np.ndarray]:
    cuts = list(range(batch_size, len(order), batch_size))
    if cuts and len(order) - cuts[-1] == 1:
        cuts.pop()
    return np.split(order, cuts)


def balanced(labels: np.ndarray, batch_size: int, images_per_class: int, *, seed: int, epoch: int) -> list[np.ndarray]:
    """P classes with K images each, P K = batch_size, in enough batches to draw M images: labels (M,).

    All classes are drawn equally often, plus or minus one. An image repeats within a batch only if its class has fewer
    than K images.
    """
    rng = np.random.default_rng((seed, epoch))
    members = _images_by_class(labels)
    classes_per_batch, batches = _epoch_size(members, batch_size, images_per_class)
    return [
        _draw(members, classes, images_per_class, rng)
        for classes in _classes_in_turn(len(members), classes_per_batch, batches, rng)
    ]


def neighboring(
    labels: np.ndarray,
    batch_size: int,
    images_per_class: int,
    class_distances: np.ndarray,
    *,
    group: int = 4,
    seed: int,
    epoch: int,
) -> list[np.ndarray]:
    """Like `balanced`, but a batch has random classes, each with its group - 1 nearest classes.

    labels (M,), class_distances (C, C). Random classes replace repeated ones.
    """
    rng = np.random.default_rng((seed, epoch))
    members = _images_by_class(labels)
    if class_distances.shape != (len(members), len(members)):
        raise ValueError(
            f"expected distances between the {len(members)} classes with images, got {class_distances.shape}"
        )
    classes_per_batch, batches = _epoch_size(members, batch_size, images_per_class)
    group = min(group, classes_per_batch)
    drawn = []
    for anchors in _classes_in_turn(len(members), classes_per_batch // group, batches, rng):
        distances = class_distances[anchors]  # (anchors, C)
        distances[np.arange(len(anchors)), anchors] = -np.inf  # a class is its own nearest
        nearest = np.argsort(distances, axis=1, kind="stable")[:, :group]
        candidates = [*nearest.ravel(), *rng.permutation(len(members))]
        classes = list(dict.fromkeys(int(label) for label in candidates))[:classes_per_batch]
        drawn.append(_draw(members, classes, images_per_class, rng))
    return drawn


def two_streams(
    labels: np.ndarray, batch_size: int, images_per_class: int, *, fraction: float = 0.75, seed: int, epoch: int
) -> list[np.ndarray]:
    """Batches that begin with a fraction of balanced images and end with shuffled ones: labels (M,).

    Each stream restarts with a new order when it ends, independently of the epoch. Their lengths are coprime, so that
    their images meet in ever new combinations. If too few classes fill the balanced fraction, batches are smaller.
    """
    available = images_per_class * len(np.unique(labels))
    batch_size = min(batch_size, round(available / fraction))
    first_size = round(fraction * batch_size)
    second_size = batch_size - first_size
    whole_classes = images_per_class * math.ceil(first_size / images_per_class)
    first_length = len(balanced(labels, whole_classes, images_per_class, seed=seed, epoch=0))
    second_length = max(1, len(labels) // max(1, second_size))
    while math.gcd(first_length, second_length) > 1:
        second_length -= 1
    batches = math.ceil(len(labels) / batch_size)
    first = cache(lambda turn: balanced(labels, whole_classes, images_per_class, seed=seed, epoch=turn))
    second = cache(lambda turn: np.random.default_rng((seed, turn, 1)).permutation(len(labels)))
    drawn = []
    for step in range(epoch * batches, (epoch + 1) * batches):
        turn, place = divmod(step, first_length)
        structured = first(turn)[place][:first_size]
        turn, place = divmod(step, second_length)
        drawn.append(np.concatenate([structured, second(turn)[place * second_size : (place + 1) * second_size]]))
    return drawn


def _images_by_class(labels: np.ndarray) -> list[np.ndarray]:
    """Image indices of each class that has images, in the order of the labels."""
    order = np.argsort(labels, kind="stable")
    ordered = labels[order]
    return np.split(order, np.flatnonzero(ordered[1:] != ordered[:-1]) + 1)


def _epoch_size(members: list[np.ndarray], batch_size: int, images_per_class: int) -> tuple[int, int]:
    """Classes per batch, and batches per epoch."""
    classes = min(len(members), batch_size // images_per_class)
    if classes < 2:
        raise ValueError(
            f"expected two classes of {counted(images_per_class, 'image')} each to fit in a batch of {batch_size}: "
            "raise batch_size or lower images_per_class"
        )
    return classes, math.ceil(sum(map(len, members)) / (classes * images_per_class))


def _classes_in_turn(classes: int, per_batch: int, batches: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Different classes for each batch; all classes are drawn before any is drawn again."""
    waiting, drawn = np.empty(0, dtype=np.int64), []
    for _ in range(batches):
        if len(waiting) < per_batch:
            again = rng.permutation(classes)
            waiting = np.concatenate([waiting, again[~np.isin(again, waiting)], again[np.isin(again, waiting)]])
        drawn.append(waiting[:per_batch])
        waiting = waiting[per_batch:]
    return drawn


def _draw(
    members: list[np.ndarray], classes: np.ndarray | list[int], images_per_class: int, rng: np.random.Generator
) -> np.ndarray:
    """Images of each class, without repetition if it has enough."""
    chosen = [members[label] for label in classes]
    return np.concatenate([rng.choice(one, images_per_class, replace=len(one) < images_per_class) for one in chosen])
