"""Images per second of decoding, of the network and of both together, and the time spent waiting for images.

    python -m benchmarks.images --data CUB_200_2011 [--size 128] [--backbone efficientnet-lite0] [--workers 0 1 2]
    python -m benchmarks.images --photo 4000 3000         synthetic photos of that size, with and without a cache

Run it on an idle machine. Synthetic photos have smooth areas and sensor noise, so that they have about as many bytes
per pixel as real ones (0.37 at quality 90).
"""

import argparse
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.profiling import print_table
from proxygml import backbones, data
from proxygml.data import sampling
from proxygml.data.cache import Cache
from proxygml.data.images import Augmentation, Crops
from proxygml.training.presets import PRESETS

BATCH = 32


def make_photos(folder: Path, count: int, size: tuple[int, int], classes: int = 4) -> None:
    """Write `count` JPEG files of `size` (width, height) into a folder per class."""
    rng = np.random.default_rng(0)
    width, height = size
    for number in range(count):
        coarse = rng.integers(0, 256, (max(1, height // 16), max(1, width // 16), 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC), dtype=np.float32)
        noisy = smooth + rng.normal(0, 6, (height, width, 1)).astype(np.float32)
        path = folder / f"class{number % classes}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(path, quality=90)


def network(name: str, frozen: tuple[str, ...]) -> nn.Module:
    """The network as the preset photos trains it: with frozen batch normalization and some frozen stages."""
    model = backbones.Embedder(backbones.build_trunk(name), 512).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    for stage in frozen:
        for module in model.trunk.stage_modules(stage):
            module.requires_grad_(False)
    return model


def step(model: nn.Module, images: torch.Tensor) -> None:
    model(images).sum().backward()
    model.zero_grad()


def seconds_to_consume(items: Iterable[object]) -> float:
    started = time.perf_counter()
    for _ in items:
        pass
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of CUB-200-2011")
    parser.add_argument("--photo", type=int, nargs=2, default=(500, 375), metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--backbone", default="efficientnet-lite0")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    preset = PRESETS["photos"][1]
    frozen = preset.frozen if options.backbone == preset.backbone else ()
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            make_photos(Path(folder), 128, tuple(options.photo))
        images, _ = data.load("cub", options.data) if options.data else data.load("folder", folder)
        cache = Cache(Path(folder) / "cache", side=2 * options.size)
        started = time.perf_counter()
        cache.fill(images, 10 * 2**30)
        filling = time.perf_counter() - started
        openers = {"files": images.open, "cache": lambda index: cache.open(images.file(index))}
        model = network(options.backbone, frozen)
        seen = options.steps * BATCH
        rows = []
        for source, workers in [(source, workers) for source in openers for workers in options.workers]:
            crops = Crops(
                openers[source], images.labels, size=options.size, augmentation=Augmentation(preset.crop_scale)
            )
            batches = sampling.shuffled(len(crops), BATCH, seed=0, epoch=0)
            batches = (batches * options.steps)[: options.steps]
            loader = DataLoader(crops, batch_sampler=batches, num_workers=workers)
            first_batch, _ = next(iter(DataLoader(crops, batch_sampler=batches[:1])))
            step(model, first_batch)
            network_only = seconds_to_consume(step(model, first_batch) for _ in range(options.steps))
            decoding_only = seconds_to_consume(loader)
            started = requested = time.perf_counter()
            waited = 0.0
            for batch, _ in loader:
                waited += time.perf_counter() - requested
                step(model, batch)
                requested = time.perf_counter()
            together = time.perf_counter() - started
            rates = [f"{seen / seconds:.0f}" for seconds in (decoding_only, network_only, together)]
            rows.append((source, str(workers), *rates, f"{waited / together:.0%}"))
        columns = ("source", "workers", "decoding only", "network only", "together", "waiting for images")
        print_table(f"{options.backbone}, {options.size} pixels, images/s", columns, rows)
        print(f"filling the cache: {len(images) / filling:.0f} images/s, once")


if __name__ == "__main__":
    main()
