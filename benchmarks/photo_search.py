"""The search for the presets for photos: fine-tuning with options that the package lacks, on held-out training classes.

    python -m benchmarks.photo_search --data ROOT [--only "rate 1e-3" ...]       run what is missing


Twenty of the 100 (98) training classes of CUB-200-2011 (Cars196) are held out; the test classes are never seen. A run
decodes all training images once (to /dev/shm), starts from EfficientNet-Lite with a random or fitted head, and writes
results/frontier/search.json: Recall@1 and MAP@R at every test size of the frozen network, before training, after it,
averaged over both flips, of weights interpolated between start and end, and of the running mean of the weights.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from proxygml import ProxyGMLLoss, data, evaluate
from proxygml.backbones import Embedder, build_trunk, load_pretrained
from proxygml.data.images import Augmentation, random_box
from proxygml.display import no_progress
from proxygml.files import atomic_write
from proxygml.memory import keep_freed_memory
from proxygml.training.initialization import fit_head, start_at_samples
from proxygml.training.run import provenance

RESULTS = Path("results/frontier/search.json")
FOLDERS, SIDES = {"cub": "CUB_200_2011", "cars": "Cars196"}, {"cub": 256, "cars": 160}
HELD_OUT = 20  # classes
DEFAULTS = {
    "dataset": "cub",
    "backbone": "efficientnet-lite0",
    "sizes": (128,),  # of training images, one after the other
    "test_sizes": (224,),
    "epochs": 2,
    "batch": 32,
    "rate": 5e-4,
    "head_rate": 1e-3,
    "proxy_rate": 3e-2,
    "epsilon": 1e-2,
    "stage_decay": 1.0,  # factor of the rate from each stage to the one before
    "warmup": 0,  # steps that train only head and proxies
    "head": "fitted",
    "proxy_start": "samples",
    "proxies": 12,
    "ratio": 1.0,
    "proxy_weight": 0.3,
    "scale": 1.0,
    "dim": 512,
    "pooling": "average+max",
    "power": 1.0,  # of the features before the head
    "layer_norm": False,  # before the head
    "ema": 0.0,  # decay of the running mean of the weights
    "min_scale": 0.16,  # of the area of a crop
    "seed": 0,
    "classes": 0,  # train on the first of them; 0: all
    "images": 0,  # and on the first images of each
}
CARS = {"dataset": "cars", "test_sizes": (160,)}
RUNS: dict[str, dict] = {
    "160 pixels": {"sizes": (160,), "test_sizes": (256, 224)},
    "224 pixels": {"sizes": (224,), "test_sizes": (224, 256, 288)},
    "EfficientNet-Lite2 at 160 pixels": {"backbone": "efficientnet-lite2", "sizes": (160,)},
    "EfficientNet-Lite2 at 224 pixels": {
        "backbone": "efficientnet-lite2",
        "sizes": (224,),
        "test_sizes": (224, 288),
    },
    "288 pixels": {"sizes": (288,), "test_sizes": (288, 368)},
    "224 pixels, 5 epochs": {"sizes": (224,), "test_sizes": (288,), "epochs": 5},
    "128 pixels, tested at 224": {},
    "the same, another seed": {"seed": 1},
    "Cars196: 160 pixels": {"dataset": "cars", "sizes": (160,), "test_sizes": (224,)},
    "Cars196: 224 pixels": {"dataset": "cars", "sizes": (224,), "test_sizes": (288,)},
    "Cars196: 128 pixels, tested at 160": CARS,
    "Cars196: tested at 128, 192 and 224": CARS | {"test_sizes": (128, 192, 224)},
    "Cars196: head and proxies at random": CARS | {"head": "random", "proxy_start": "random"},
    "tested at 128, 160, 192, 256 and 288": {"test_sizes": (128, 160, 192, 256, 288)},
    "rate 2e-4": {"rate": 2e-4},
    "rate 1e-3": {"rate": 1e-3},
    "Cars196: rate 1e-3": CARS | {"rate": 1e-3},
    "running mean of weights": {"ema": 0.99},
    "4 epochs": {"epochs": 4},
    "128, then 160 pixels": {"sizes": (128, 160)},
    "epsilon 1e-8, rates 5e-5, 2e-4, 1e-2": {"epsilon": 1e-8, "rate": 5e-5, "head_rate": 2e-4, "proxy_rate": 1e-2},
    "ratio 0.2": {"ratio": 0.2},
    "no regularizer": {"proxy_weight": 0.0},
    "scale 2": {"scale": 2.0},
    "4 proxies per class": {"proxies": 4},
    "average pooling": {"pooling": "average"},
    "features to the power 0.5": {"power": 0.5},
    "layer normalization before the head": {"layer_norm": True},
    "50 steps of warm-up": {"warmup": 50},
    "smaller rates for early stages": {"stage_decay": 0.8, "rate": 1e-3},
    "crops from 0.3 of the area": {"min_scale": 0.3},
    "batches of 64": {"batch": 64},
    "10 classes, 5 epochs": {"classes": 10, "epochs": 5},
    "10 classes, 20 epochs": {"classes": 10, "epochs": 20},
    "10 classes of 10 images, 5 epochs": {"classes": 10, "images": 10, "epochs": 5},
    "10 classes of 10 images, 50 epochs": {"classes": 10, "images": 10, "epochs": 50},
    "80 classes of 5 images, 5 epochs": {"images": 5, "epochs": 5},
    "80 classes of 5 images, 20 epochs": {"images": 5, "epochs": 20},
}


class Photos:
    """The training images of a dataset in one memory map."""

    def __init__(self, root: Path, dataset: str) -> None:
        cache, side = Path("/dev/shm") / f"photo_search-{dataset}", SIDES[dataset]
        if not cache.with_suffix(".npz").exists():
            images, _ = data.load(dataset, root / FOLDERS[dataset])
            rows = [row for row in range(len(images)) if images.file(row).exists()]
            shapes = []
            with cache.with_suffix(".bin").open("wb") as file:
                for row in rows:
                    image = images.open(row).convert("RGB")
                    scale = side / min(image.size)
                    if scale < 1:
                        image = image.resize(tuple(max(side, round(scale * n)) for n in image.size), Image.BILINEAR)
                    shapes.append(np.asarray(image).shape)
                    file.write(np.asarray(image).tobytes())
            np.savez(cache.with_suffix(".npz"), shapes=shapes, labels=images.labels[rows])
        stored = np.load(cache.with_suffix(".npz"), allow_pickle=False)
        self.labels, self.shapes = stored["labels"], stored["shapes"]
        self.ends = self.shapes.prod(1).cumsum()
        self.bytes = np.memmap(cache.with_suffix(".bin"), np.uint8, "r")

    def crop(self, row: int, box: Callable[[int, int], Sequence[int]], size: int) -> Image.Image:
        """A crop, given by a function of width and height, resized to a square."""
        end, shape = self.ends[row], self.shapes[row]
        image = Image.fromarray(self.bytes[end - shape.prod() : end].reshape(shape))
        return image.crop(tuple(box(*image.size))).resize((size, size), Image.BILINEAR)


def center(width: int, height: int) -> tuple[int, int, int, int]:
    side = round(min(width, height) * 0.875)
    left, upper = (width - side) // 2, (height - side) // 2
    return left, upper, left + side, upper + side


def stack(images: Sequence[Image.Image]) -> Tensor:
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))  # (B, H, W, 3)
    return pixels.permute(0, 3, 1, 2).float().contiguous(memory_format=torch.channels_last)


class Network(nn.Module):
    """An Embedder whose pooled features may be raised to a power or normalized before the head."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embedder = Embedder(build_trunk(options.backbone), options.dim, pooling=options.pooling)
        load_pretrained(self.embedder.trunk, "pretrained")
        self.pooling, self.power, self.layer_norm = options.pooling, options.power, options.layer_norm

    def features(self, images: Tensor) -> Tensor:
        mean, largest = self.embedder.features(images)
        pooled = {"average": mean, "max": largest, "average+max": mean + largest}[self.pooling]
        if self.power != 1:
            pooled = (pooled + 1e-3) ** self.power - 1e-3**self.power
        return F.layer_norm(pooled, pooled.shape[1:]) if self.layer_norm else pooled

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.embedder.head(self.features(images)), dim=1)


@torch.inference_mode()
def run_batches(module: Callable[[Tensor], Tensor], photos: Photos, rows: np.ndarray, size: int) -> np.ndarray:
    parts = np.array_split(rows, max(1, len(rows) // 32))
    return np.concatenate([module(stack([photos.crop(row, center, size) for row in part])).numpy() for part in parts])


def search(options: argparse.Namespace, photos: Photos) -> dict:
    """One run: its log."""
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    classes = photos.labels.max() + 1
    held_out = np.random.default_rng(123).permutation(classes)[:HELD_OUT]
    kept = np.setdiff1d(np.arange(classes), held_out)[: options.classes or None]
    train = np.concatenate([np.flatnonzero(photos.labels == each)[: options.images or None] for each in kept])
    test = np.flatnonzero(np.isin(photos.labels, held_out))
    labels = np.unique(photos.labels[train], return_inverse=True)[1]
    network = Network(options).eval()
    head = network.embedder.head

    def score(vectors: np.ndarray) -> tuple[float, float]:
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        scores = evaluate(vectors, photos.labels[test], cluster=False, recall_at=(1,))
        return round(100 * scores.recall[1], 2), round(100 * scores.map_at_r, 2)

    def scores(module: Callable[[Tensor], Tensor] = network) -> dict[int, tuple[float, float]]:
        return {size: score(run_batches(module, photos, test, size)) for size in options.test_sizes}

    log: dict = {"frozen": scores(network.features)}
    started = time.process_time()
    features = run_batches(network.features, photos, train, options.test_sizes[-1])
    if options.head == "fitted":
        fit_head(head, features, labels, seed=options.seed, progress=no_progress)
    log |= {"start": scores(), "start_minutes": (time.process_time() - started) / 60}
    loss = ProxyGMLLoss(
        len(kept),
        options.dim,
        proxies_per_class=options.proxies,
        ratio=options.ratio,
        proxy_weight=options.proxy_weight,
        scale=options.scale,
    )
    if options.proxy_start == "samples":
        with torch.inference_mode():
            vectors = F.normalize(head(torch.from_numpy(features)), dim=1).numpy()
        start_at_samples(loss.proxies, vectors, labels, seed=options.seed)
    trunk = network.embedder.trunk
    groups = [
        {
            "params": [p for module in trunk.stage_modules(stage) for p in module.parameters()],
            "lr": options.rate * options.stage_decay**depth,
        }
        for depth, stage in enumerate(reversed(trunk.stages))
    ]
    groups += [{"params": head.parameters(), "lr": options.head_rate}]
    groups += [{"params": loss.parameters(), "lr": options.proxy_rate}]
    optimizer = torch.optim.Adam(groups, eps=options.epsilon, weight_decay=1e-4, fused=True)
    rates = [group["lr"] for group in groups]
    first = {name: value.clone() for name, value in network.state_dict().items()}
    mean = {name: value.clone() for name, value in first.items()}
    steps = max(1, len(train) // options.batch)
    log["epochs"], step, started = [], 0, time.process_time()
    augmentation = Augmentation((options.min_scale, 1.0))
    for epoch in range(options.epochs):
        size = options.sizes[min(len(options.sizes) - 1, epoch * len(options.sizes) // options.epochs)]
        values = []
        for part in np.array_split(rng.permutation(len(train)), steps):
            factor = 0.5 * (1 + math.cos(math.pi * step / (steps * options.epochs)))
            for number, (group, rate) in enumerate(zip(optimizer.param_groups, rates, strict=True)):
                warming = number < len(rates) - 2 and step < options.warmup
                group["lr"] = 0.0 if warming else rate * factor
            crops = [photos.crop(train[i], lambda *wh: random_box(*wh, augmentation, rng), size) for i in part]
            flipped = [crop.transpose(Image.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else crop for crop in crops]
            value = loss(network(stack(flipped)), torch.from_numpy(labels[part]))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            values.append(value.item())
            step += 1
            if options.ema:
                for name, current in network.state_dict().items():
                    if current.dtype.is_floating_point:
                        mean[name].lerp_(current, 1 - min(options.ema, (1 + step) / (10 + step)))
        done = epoch + 1 == options.epochs
        log["epochs"].append([epoch + 1, round(float(np.mean(values)), 3), scores() if done else None])
    log["training_minutes"] = (time.process_time() - started) / 60
    log["flips"] = scores(lambda images: network(images) + network(images.flip(3)))
    last = {name: value.clone() for name, value in network.state_dict().items()}
    states = {"ema": mean} if options.ema else {}
    for fraction in (0.5, 0.75):
        states[f"interpolated {fraction}"] = {
            name: value.lerp(last[name], fraction) for name, value in first.items() if value.dtype.is_floating_point
        }
    for name, state in states.items():
        network.load_state_dict(state, strict=False)
        log[name] = scores()
    return log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with CUB_200_2011 and Cars196")
    parser.add_argument("--only", nargs="+", choices=RUNS, help="these runs")
    given = parser.parse_args()
    keep_freed_memory()
    for name in given.only or RUNS:
        found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        if name in found:
            continue
        options = argparse.Namespace(**DEFAULTS | RUNS[name])
        log = search(options, Photos(given.data, options.dataset))
        command = f"python -m benchmarks.photo_search --only '{name}'"
        found[name] = {"settings": RUNS[name], **log, "made_by": provenance() | {"command": command}}
        with atomic_write(RESULTS) as path:
            path.write_text(json.dumps(found, indent=1) + "\n")
        print(name, log, flush=True)


if __name__ == "__main__":
    main()
