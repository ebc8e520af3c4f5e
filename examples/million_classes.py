"""A million classes on a CPU: row-sparse gradients, row-wise Adam, and classes spread over processes.

    python examples/million_classes.py
    torchrun --nproc-per-node=2 examples/million_classes.py

The data is synthetic: a few informative directions among louder, uninformative ones. A linear network has to find
them, and is evaluated on unseen classes.
"""

import argparse
import json
import math
import os
import resource
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from proxygml import ProxyGMLLoss, ProxyGMLSettings, RowAdam, ShardedProxyGMLLoss, evaluate

INFORMATIVE, NOISE = 48, 208  # number of directions that depend on the class, and that do not
FEATURES = INFORMATIVE + NOISE


class Items:
    """Synthetic items, generated on demand: memory does not grow with the number of classes."""

    def __init__(self) -> None:
        self.mixing = torch.linalg.qr(torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(0)))[0]
        self.superclasses = torch.randn(1000, INFORMATIVE, generator=torch.Generator().manual_seed(1))

    def centers(self, classes: Tensor) -> Tensor:
        """Class centers: classes (B,) -> (B, INFORMATIVE). Classes of the same superclass are close."""
        steps = torch.arange(1, INFORMATIVE + 1)
        offsets = torch.sin(classes[:, None].double() * steps.double().sqrt() * 12.9898 + steps).float()  # a hash
        return self.superclasses[classes % len(self.superclasses)] + offsets

    def draw(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        """One random item per class: classes (B,) -> (B, FEATURES)."""
        informative = self.centers(classes) + 0.7 * torch.randn(len(classes), INFORMATIVE, generator=generator)
        noise = 2 * torch.randn(len(classes), NOISE, generator=generator)
        return torch.cat([informative, noise], dim=1) @ self.mixing


def recall_at_1(network: nn.Module, items: Items, first_unseen: int) -> float:
    """Recall@1 on 2,000 unseen classes with 4 items each."""
    classes = torch.arange(first_unseen, first_unseen + 2000).repeat_interleave(4)
    with torch.no_grad():
        vectors = F.normalize(network(items.draw(classes, torch.Generator().manual_seed(2))), dim=1)
    return evaluate(vectors, classes, recall_at=(1,), cluster=False).recall[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=1_000_000)
    parser.add_argument("--links", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64, help="batch size over all processes")
    parser.add_argument("--out", type=Path, help="write the log here, as JSON")
    options = parser.parse_args()
    processes, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    torch.manual_seed(0)
    items, network = Items(), nn.Linear(FEATURES, 128, bias=False)
    settings = ProxyGMLSettings(
        proxies_per_class=1, links=options.links, proxy_weight=0.0, scale=16.0, sparse_gradient=True
    )
    if processes > 1:
        dist.init_process_group("gloo")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
        loss = ShardedProxyGMLLoss(options.classes, 128, settings)
        first, model = loss.first_class, nn.parallel.DistributedDataParallel(network)
    else:
        loss = ProxyGMLLoss(options.classes, 128, **asdict(settings))
        first, model = 0, network
    with torch.no_grad():  # start each proxy at an item of its class: most classes are seen only once or twice
        for classes in torch.arange(first, first + len(loss.proxies)).split(2**14):
            generator = torch.Generator().manual_seed(int(classes[0]))
            loss.proxies[classes - first, 0] = F.normalize(network(items.draw(classes, generator)), dim=1)
    optimizer = RowAdam(
        [{"params": network.parameters(), "lr": 5e-3}, {"params": loss.parameters(), "lr": 1e-3}], fused=True
    )

    generator = torch.Generator().manual_seed(3)
    log, start = [], time.perf_counter()
    for step in range(options.steps + 1):
        if step % max(1, options.steps // 10) == 0 and rank == 0:
            recall = recall_at_1(network, items, options.classes)
            seconds, memory = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            log.append({"step": step, "seconds": seconds, "recall@1": recall, "gigabytes": memory})
            print(f"step {step:5d} {seconds:6.1f} s   Recall@1 {100 * recall:5.1f} %   {memory:.2f} GB", flush=True)
        classes = torch.randint(options.classes, (options.batch,), generator=generator)
        features = items.draw(classes, generator)
        local = slice(rank * len(classes) // processes, (rank + 1) * len(classes) // processes)
        value = loss(model(features[local]), classes[local])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if not math.isfinite(value.item()):
            raise SystemExit(f"the loss is {value.item()} at step {step}")
    if rank == 0 and options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            json.dumps({**vars(options), "out": str(options.out), "processes": processes, "log": log})
        )
    if processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
