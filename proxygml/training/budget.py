"""How to use a number of minutes: the size of training images and the epochs that fit on this machine."""

import time
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from proxygml.data import ImageList
from proxygml.data.splits import hold_out
from proxygml.display import Progress, counted
from proxygml.memory import keep_freed_memory
from proxygml.training import build
from proxygml.training.loop import freeze_statistics
from proxygml.training.parts import Parts
from proxygml.training.recipe import Recipe

SIZES = (224, 192, 160, 128)  # of training images; larger is better and slower
MIN_EPOCHS, MAX_EPOCHS = 4, 12  # a smaller size is better than fewer epochs; more epochs hardly help
SAFETY = 0.9  # fraction of the time that is planned
STEPS = 3  # of a measurement


def fit_to_minutes(recipe: Recipe, minutes: float, parts: Parts, progress: Progress) -> Recipe:
    """The recipe with the image size and epochs that take at most this many minutes, measured on this machine.

    If not even a head can be fitted to all training images in that time, fewer images per class are used.
    """
    if not 0 < minutes < 1e6:
        raise ValueError(f"expected minutes above 0, got {minutes}")
    if recipe.head_start != "fitted" or recipe.devices * recipe.nodes > 1:
        raise ValueError("minutes needs a preset for photos (head_start fitted), in one process")
    progress("measuring speed", 0, 1, "")
    images, test_images = build.load_images(recipe, parts.data)
    trained, _ = hold_out(images, recipe.held_out if test_images else 0.0)
    seconds = SAFETY * 60 * minutes
    forward = _seconds_per_image(recipe, parts, trained, train=False)
    tested = (1 + recipe.baselines) * len(test_images) * recipe.test
    embedded = 2 * len(images) + tested  # fitting the head takes about as long as embedding
    start = forward * embedded
    chosen: dict[str, Any] = {"epochs": 0, "held_out": 0.0}
    what = "only the head on frozen features"
    if start > seconds:
        fraction = max(seconds - forward * tested, 0) / (start - forward * tested)
        chosen["max_class_size"] = max(2, int(fraction * np.bincount(images.labels).max()))
        all_minutes = start / SAFETY / 60
        what += f", of {chosen['max_class_size']} images per class: {all_minutes:.0f} minutes would use all"
    else:
        for size in sorted({*SIZES, recipe.image_size}, reverse=True):
            sized = recipe.changed({"image_size": size})
            forward = _seconds_per_image(sized, parts, trained, train=False)
            step = _seconds_per_image(sized, parts, trained, train=True)
            left = seconds - forward * embedded
            epochs = int(left / (step * len(trained) + forward * (len(images) - len(trained))))
            if epochs >= MIN_EPOCHS or (epochs and size <= min(SIZES)):
                chosen = {"image_size": size, "epochs": min(epochs, MAX_EPOCHS)}
                what = f"{counted(chosen['epochs'], 'epoch')} of {size} pixels, {1 / step:.0f} images/s here"
                break
    progress("measuring speed", 1, 1, "")
    progress(f"{minutes:g} minutes", 0, 0, what)
    return recipe.changed(chosen)


def _seconds_per_image(recipe: Recipe, parts: Parts, images: ImageList, *, train: bool) -> float:
    """Seconds to decode an image and to train on it, or to embed it: the fastest of some batches."""
    device = build.find_device(recipe.device) or torch.device("cpu")
    if device.type == "cpu":
        keep_freed_memory()
    model = build.build_model(recipe, parts.network).to(device)
    loss = build.build_loss(recipe, len(images.class_names), parts.loss).to(device)
    model.train(train)
    freeze_statistics(model)
    crops = build.training_crops(recipe, images, 0) if train else build.test_crops(recipe, images)
    rng, times = np.random.default_rng(0), []
    for _ in range(STEPS):
        drawn = rng.permutation(len(images))[: recipe.batch_size]
        started = time.perf_counter()
        pixels, labels = default_collate([crops[index] for index in drawn])
        with torch.set_grad_enabled(train):
            value = loss(model(pixels.to(device)), labels.to(device))
        if train:
            value.backward()
        value.item()  # waits for the device
        times.append((time.perf_counter() - started) / len(drawn))
    return min(times)
