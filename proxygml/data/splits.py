"""Splits by class: images to train on and images to choose the best epoch on."""

import numpy as np

from proxygml.data import ImageList


def hold_out(images: ImageList, fraction: float) -> tuple[ImageList, ImageList | None]:
    """Images of the training classes and of the held-out classes; None where the fraction is under two classes."""
    classes = len(images.class_names)
    if classes < 2:
        raise ValueError("expected at least two classes to train on, got one: add classes, or lower --test-fraction")
    count = round(fraction * classes)
    if count < 2:
        return images, None
    if classes - count < 2:
        raise ValueError(f"held_out {fraction} leaves {classes - count} of {classes} classes to train on: lower it")
    order = np.random.default_rng(0).permutation(classes)  # the same classes for every seed, so that seeds compare
    return images.of_classes(np.sort(order[count:])), images.of_classes(np.sort(order[:count]))
