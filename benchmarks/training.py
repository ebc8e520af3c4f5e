"""How the time of a training step is divided, and which fraction of an epoch evaluation on held-out classes takes.

    python -m benchmarks.training [--quick] [--data CUB_200_2011]

Measures the preset glyphs, and photos at 160 pixels on CUB-200-2011 or, without --data, on synthetic photos of the
same size. Writes results/bench/training.json; `python -m benchmarks.report` renders it in docs/performance.md.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader

from benchmarks.images import make_photos
from benchmarks.profiling import print_table, save
from proxygml.data.splits import hold_out
from proxygml.training import build, start
from proxygml.training.presets import GLYPHS, PRESETS
from proxygml.training.recipe import Recipe

PARTS = ("images", "network", "loss", "backward", "optimizer")


def step_times(recipe: Recipe, steps: int) -> Iterator[dict[str, float]]:
    """Milliseconds of the parts of each training step, without the first step."""
    torch.manual_seed(0)
    images, _ = build.load_images(recipe)
    images, _ = hold_out(images, recipe.held_out)
    model, loss = build.build_model(recipe).train(), build.build_loss(recipe, len(images.class_names))
    if recipe.freeze_batch_norm:
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
    optimizer = build.build_optimizer(recipe, model, loss)
    batches = build.draw_batches(recipe, images.labels, loss, epoch=0)
    batches = (batches * (1 + steps // len(batches)))[: steps + 1]
    loader = iter(DataLoader(build.training_crops(recipe, images, 0), batch_sampler=batches))
    for number in range(steps + 1):
        times = [time.perf_counter()]
        pixels, labels = next(loader)
        times.append(time.perf_counter())
        embeddings = model(pixels)
        times.append(time.perf_counter())
        value = loss(embeddings, labels)
        times.append(time.perf_counter())
        optimizer.zero_grad()
        value.backward()
        times.append(time.perf_counter())
        optimizer.step()
        times.append(time.perf_counter())
        if number:
            pairs = zip(PARTS, times, times[1:], strict=False)
            yield {part: 1000 * (after - before) for part, before, after in pairs}


def evaluation_fraction(recipe: Recipe) -> float:
    """Fraction of an epoch spent on evaluating held-out classes, median over epochs."""
    with tempfile.TemporaryDirectory() as folder:
        log = start.train(
            recipe.changed({"epochs": 3, "baselines": False, "test": False}), Path(folder) / "run", progress=False
        ).log
    return statistics.median(1 - entry["training_seconds"] / entry["seconds"] for entry in log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, about a minute")
    parser.add_argument("--data", type=Path, help="folder of CUB-200-2011")
    options = parser.parse_args()
    photos = PRESETS["photos"][1].changed({"dataset": "cub", "cache": None})
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            make_photos(Path(folder), 400, (500, 375), classes=40)
            photos = photos.changed({"dataset": "folder", "data": folder})
        else:
            photos = photos.changed({"data": str(options.data)})
        cases = {
            "glyphs": (GLYPHS, 40),
            "160 pixels, CUB" if options.data else "160 pixels, synthetic photos": (photos, 8),
        }
        for name, (recipe, steps) in cases.items():
            times = list(step_times(recipe, steps if options.quick else 4 * steps))
            parts = {part: round(statistics.median(step[part] for step in times), 2) for part in PARTS}
            results[name] = {"parts_ms": parts}
            if not (options.quick and recipe is photos):
                results[name]["evaluation_fraction"] = round(evaluation_fraction(recipe), 4)
                print(f"{name}: evaluation takes {results[name]['evaluation_fraction']:.1%} of an epoch")
            rows = [(part, f"{ms:.1f}", f"{ms / sum(parts.values()):.1%}") for part, ms in parts.items()]
            print_table(name, ("part of a step", "median ms", "fraction"), rows)
    print(f"written: {save('training', {'cases': results})}")


if __name__ == "__main__":
    main()
