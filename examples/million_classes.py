"""A million classes on a CPU: row-sparse gradients, row-wise Adam, and classes spread over processes.

    python examples/million_classes.py
    torchrun --nproc-per-node=2 examples/million_classes.py

Items are made up: what tells classes apart lies in a few directions, hidden in louder ones that say nothing. A linear
network has to find them. It is scored on classes that it never sees.
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

from proxygml import ProxyGMLLoss, ProxyGMLSettings, RowAdam, ShardedProxyGMLLoss
from proxygml.evaluation import evaluate

TELLING, LOUD = 48, 208  # directions of an item that tell classes apart, and that do not
FEATURES = TELLING + LOUD


class Items:
    """Items of any class, made up when they are asked for: nothing of the size of all classes is kept."""

    def __init__(self) -> None:
        self.mixing = torch.linalg.qr(torch.randn(FEATURES, FEATURES, generator=torch.Generator().manual_seed(0)))[0]
        self.kinds = torch.randn(1000, TELLING, generator=torch.Generator().manual_seed(1))

    def centres(self, classes: Tensor) -> Tensor:
        """What is common to the items of each class (B,): (B, TELLING). Classes are near others of their kind."""
        steps = torch.arange(1, TELLING + 1)
        own = torch.sin(classes[:, None].double() * steps.double().sqrt() * 12.9898 + steps).float()  # looks random
        return self.kinds[classes % len(self.kinds)] + own

    def draw(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        """One item of each class (B,): (B, FEATURES)."""
        telling = self.centres(classes) + 0.7 * torch.randn(len(classes), TELLING, generator=generator)
        loud = 2 * torch.randn(len(classes), LOUD, generator=generator)
        return torch.cat([telling, loud], dim=1) @ self.mixing


def score(network: nn.Module, items: Items, first_unseen: int) -> float:
    """Recall@1 of 2,000 unseen classes of 4 items each."""
    classes = torch.arange(first_unseen, first_unseen + 2000).repeat_interleave(4)
    with torch.no_grad():
        vectors = F.normalize(network(items.draw(classes, torch.Generator().manual_seed(2))), dim=1)
    return evaluate(vectors, classes, recall_at=(1,), cluster=False).recall[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--classes", type=int, default=1_000_000)
    parser.add_argument("--links", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=64, help="of all processes together")
    parser.add_argument("--out", type=Path, help="where to write the log as JSON")
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
        first, trained = loss.first_class, nn.parallel.DistributedDataParallel(network)
    else:
        loss = ProxyGMLLoss(options.classes, 128, **asdict(settings))
        first, trained = 0, network
    with torch.no_grad():  # each class begins at one of its items: with so many, most are seen only once or twice
        for part in torch.arange(first, first + len(loss.proxies)).split(2**14):
            own = torch.Generator().manual_seed(int(part[0]))
            loss.proxies[part - first, 0] = F.normalize(network(items.draw(part, own)), dim=1)
    optimizer = RowAdam(
        [{"params": network.parameters(), "lr": 5e-3}, {"params": loss.parameters(), "lr": 1e-3}], fused=True
    )

    chance = torch.Generator().manual_seed(3)
    log, began = [], time.perf_counter()
    for step in range(options.steps + 1):
        if step % max(1, options.steps // 10) == 0 and rank == 0:
            recall = score(network, items, options.classes)
            seconds, memory = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            log.append({"step": step, "seconds": seconds, "recall@1": recall, "gigabytes": memory})
            print(f"step {step:5d} {seconds:6.1f} s   Recall@1 {100 * recall:5.1f} %   {memory:.2f} GB", flush=True)
        classes = torch.randint(options.classes, (options.batch,), generator=chance)
        features = items.draw(classes, chance)
        mine = slice(rank * len(classes) // processes, (rank + 1) * len(classes) // processes)
        value = loss(trained(features[mine]), classes[mine])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if not math.isfinite(value.item()):
            raise SystemExit(f"the loss became {value.item()} in step {step}")
    if rank == 0 and options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            json.dumps({**vars(options), "out": str(options.out), "processes": processes, "log": log})
        )
    if processes > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
