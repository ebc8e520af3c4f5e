"""Images per second of decoding alone, of the network alone and of both together, and the share of waiting.

    python -m benchmarks.images --data CUB_200_2011 [--size 128] [--backbone efficientnet-lite0] [--workers 0 1 2]

Without --data it makes photos of the usual size of CUB-200-2011 first.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader

from proxygml import backbones, datasets, sampling
from proxygml.images import Augmentation, Crops

BATCH = 32


def make_photos(folder: Path, count: int) -> None:
    """JPEG files of 500 x 375 pixels with the smooth areas and edges that real ones have."""
    random = np.random.default_rng(0)
    for number in range(count):
        coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        path = folder / f"class{number % 4}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(path, quality=90)


def loader(crops: Crops, steps: int, workers: int) -> DataLoader:
    batches = sampling.shuffled(len(crops), BATCH, seed=0, epoch=0)
    return DataLoader(crops, batch_sampler=(batches * steps)[:steps], num_workers=workers)


def step(model: nn.Module, images: torch.Tensor) -> None:
    model(images).sum().backward()
    model.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder of CUB-200-2011")
    parser.add_argument("--size", type=int, default=128)
    parser.add_argument("--backbone", default="efficientnet-lite0")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            make_photos(Path(folder), 256)
        images, _ = datasets.load("cub", options.data) if options.data else datasets.load("folder", folder)
        crops = Crops(images.open, images.labels, size=options.size, augmentation=Augmentation())
        model = backbones.build(options.backbone, embedding_dim=512).train()
        one, _ = next(iter(loader(crops, 1, 0)))
        step(model, one)
        started = time.perf_counter()
        for _ in range(options.steps):
            step(model, one)
        network = time.perf_counter() - started

        table = Table(title=f"{options.backbone}, {options.size} pixels, images/s", title_justify="left", box=None)
        for column in ("workers", "decoding alone", "network alone", "together", "share of waiting"):
            table.add_column(column, justify="right")
        seen = options.steps * BATCH
        for workers in options.workers:
            started = time.perf_counter()
            for _ in loader(crops, options.steps, workers):
                pass
            decoding = time.perf_counter() - started
            started, waited = time.perf_counter(), 0.0
            asked = started
            for batch, _ in loader(crops, options.steps, workers):
                waited += time.perf_counter() - asked
                step(model, batch)
                asked = time.perf_counter()
            together = time.perf_counter() - started
            figures = [f"{seen / seconds:.0f}" for seconds in (decoding, network, together)]
            table.add_row(str(workers), *figures, f"{100 * waited / together:.0f} %")
        Console().print(table)


if __name__ == "__main__":
    main()
