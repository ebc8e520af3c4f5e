"""Forward and backward of the loss beside its dense form, its peers and the matrix products it cannot avoid.

All are timed in turn in one process, so that what else the machine does falls on all of them; read the ratios.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses as pml
from rich.console import Console
from rich.table import Table
from torch import Tensor

from proxygml import ProxyGMLLoss

CASES = {  # name: classes, proxies per class, dimension, batch, proxy weight
    "Cars, batch 32": (98, 12, 512, 32, 0.3),
    "Cars, batch 180": (98, 12, 512, 180, 0.3),
    "SOP, batch 32": (11318, 1, 512, 32, 0.0),
}


def dense_equations(proxies: Tensor, samples: Tensor, labels: Tensor, links: int, weight: float) -> Tensor:
    """The loss as the paper writes it: one-hot Y^p, full masks, and S^p with (CN)^2 entries."""
    classes, per_class, _ = proxies.shape
    proxies = F.normalize(proxies.flatten(0, 1), dim=-1)  # (CN, D)
    proxy_labels = F.one_hot(torch.arange(classes).repeat_interleave(per_class)).float()  # (CN, C)
    similarity = F.normalize(samples, dim=-1) @ proxies.T  # (B, CN)
    positive = F.one_hot(labels, classes).float() @ proxy_labels.T  # (B, CN)
    chosen = torch.zeros_like(similarity).scatter_(1, (similarity + 4 * positive).topk(links).indices, 1)
    scores = (similarity * chosen) @ proxy_labels  # (B, C)
    exponents = scores.exp() * (scores != 0)
    loss = -((exponents / exponents.sum(1, keepdim=True)).gather(1, labels[:, None]) + 1e-20).log().mean()
    if weight:
        loss = loss + weight * F.cross_entropy(proxies @ proxies.T @ proxy_labels, proxy_labels.argmax(1))
    return loss


def contenders(
    classes: int, per_class: int, dimension: int, batch: int, weight: float
) -> dict[str, Callable[[], None]]:
    """One forward and backward pass of each, by name."""
    torch.manual_seed(0)
    samples = torch.randn(batch, dimension, requires_grad=True)
    labels = torch.randint(classes, (batch,))
    ours = ProxyGMLLoss(classes, dimension, proxies_per_class=per_class, proxy_weight=weight)
    products = torch.randn(classes * per_class, dimension, requires_grad=True)
    class_sums = torch.randn(classes, dimension, requires_grad=True)
    score_gradient = torch.ones(batch, classes * per_class)
    proxy_gradient = torch.ones(classes * per_class, classes) if weight else None

    def limit() -> None:
        """The products of forward and backward, without normalisation, selection or softmax."""
        (samples @ products.T).backward(score_gradient)
        if weight:
            (products @ class_sums.T).backward(proxy_gradient)

    peers = {
        "SoftTriple (PML)": pml.SoftTripleLoss(classes, dimension, centers_per_class=max(2, per_class)),
        "Proxy-Anchor (PML)": pml.ProxyAnchorLoss(classes, dimension),
        "ProxyNCA (PML)": pml.ProxyNCALoss(classes, dimension, softmax_scale=9),
    }
    return {
        "proxygml": lambda: ours(samples, labels).backward(),
        "dense equations": lambda: dense_equations(ours.proxies, samples, labels, ours.links, weight).backward(),
        **{name: (lambda peer=peer: peer(samples, labels).backward()) for name, peer in peers.items()},
        "products alone": limit,
    }


def measure(calls: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, taken in turn after one round to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats + 1):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few repeats, under a minute")
    repeats = 5 if parser.parse_args().quick else 30
    for case, shape in CASES.items():
        seconds = measure(contenders(*shape), repeats)
        ours = statistics.median(seconds["proxygml"])
        table = Table(title=case, title_justify="left", box=None)
        for column in ("", "median ms", "fastest", "slowest", "times ours"):
            table.add_column(column, justify="right" if column else "left")
        for name, taken in seconds.items():
            middle = statistics.median(taken)
            figures = [f"{1e3 * x:.1f}" for x in (middle, min(taken), max(taken))]
            table.add_row(name, *figures, f"{middle / ours:.2f}")
        Console().print(table, "")


if __name__ == "__main__":
    main()
