"""Where the time of a training step goes, and what share of an epoch the scoring of held-out classes takes.

    python -m benchmarks.training [--quick] [--data CUB_200_2011]

On glyphs as its preset trains it, and at 128 pixels as cub-small does, on CUB-200-2011 or, without --data, on made-up
photos of that size. Writes results/bench/training.json, of which `python -m benchmarks.report` makes
docs/performance.md.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from benchmarks.images import make_photos
from benchmarks.measuring import save
from proxygml import ingredients
from proxygml.recipes import GLYPHS, PRESETS, Recipe
from proxygml.training import train

PARTS = ("images", "network", "loss", "backward", "optimizer")


def step_times(recipe: Recipe, steps: int) -> Iterator[dict[str, float]]:
    """Milliseconds of the parts of each training step, the first left out."""
    torch.manual_seed(0)
    images, _ = ingredients.load_images(recipe)
    images, _ = ingredients.hold_out(images, recipe.held_out)
    model, loss = ingredients.build_model(recipe).train(), ingredients.build_loss(recipe, len(images.class_names))
    if recipe.freeze_batch_norm:
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.eval()
    optimizer = ingredients.build_optimizer(recipe, model, loss)
    batches = ingredients.draw_batches(recipe, images.labels, loss, epoch=0)
    batches = (batches * (1 + steps // len(batches)))[: steps + 1]
    loader = iter(DataLoader(ingredients.training_crops(recipe, images, 0), batch_sampler=batches))
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


def scoring_share(recipe: Recipe) -> float:
    """Of the time of an epoch, what scoring the held-out classes takes; the median over epochs."""
    with tempfile.TemporaryDirectory() as folder:
        log = train(recipe.changed({"epochs": 3, "baselines": False, "test": False}), Path(folder) / "run").log
    return statistics.median(1 - entry["training_seconds"] / entry["seconds"] for entry in log)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps: a minute")
    parser.add_argument("--data", type=Path, help="folder of CUB-200-2011")
    options = parser.parse_args()
    photos = PRESETS["cub-small"][1]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            make_photos(Path(folder), 400, (500, 375), classes=40)
            photos = photos.changed({"dataset": "folder", "data": folder, "weights": None})
        else:
            photos = photos.changed({"data": str(options.data)})
        cases = {
            "glyphs": (GLYPHS, 40),
            "128 pixels, CUB" if options.data else "128 pixels, made-up photos": (photos, 8),
        }
        for name, (recipe, steps) in cases.items():
            times = list(step_times(recipe, steps if options.quick else 4 * steps))
            parts = {part: round(statistics.median(one[part] for one in times), 2) for part in PARTS}
            found[name] = {"parts_ms": parts}
            if not (options.quick and recipe is photos):
                found[name]["scoring_share"] = round(scoring_share(recipe), 4)
            table = Table(title=name, title_justify="left", box=None)
            for column in ("part of a step", "median ms", "share"):
                table.add_column(column, justify="right" if column != "part of a step" else "left")
            for part, taken in parts.items():
                table.add_row(part, f"{taken:.1f}", f"{100 * taken / sum(parts.values()):.1f} %")
            Console().print(table)
            if "scoring_share" in found[name]:
                Console().print(
                    f"scoring takes {100 * found[name]['scoring_share']:.1f} % of an epoch", highlight=False
                )
            Console().print()
    print(f"written: {save('training', {'cases': found})}")


if __name__ == "__main__":
    main()
