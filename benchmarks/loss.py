"""Forward and backward of the loss beside its definition, its peers and the matrix products it cannot avoid.

    python -m benchmarks.loss [--quick] [--only 0 2]

Writes results/bench/loss.json; `python -m benchmarks.report` makes docs/performance.md of it.
"""

import argparse
import gc
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from pytorch_metric_learning import losses as pml
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measuring import peak_megabytes, save, take_turns
from proxygml import ProxyGMLLoss
from proxygml.losses.proxygml import buffers
from proxygml.losses.proxygml.fused import fits_fused


class Case(NamedTuple):
    classes: int
    per_class: int
    dimension: int
    batch: int
    links: float  # a fraction of all proxies, or from 1 on their number
    weight: float  # of the regularizer
    threads: int | None = None  # as many as there are


CASES = {
    "Cars, batch 32": Case(98, 12, 512, 32, 0.05, 0.3),
    "Cars, batch 32, one thread": Case(98, 12, 512, 32, 0.05, 0.3, threads=1),
    "Cars, batch 180": Case(98, 12, 512, 180, 0.05, 0.3),
    "SOP, batch 32": Case(11318, 1, 512, 32, 0.05, 0.0),
    "SOP, batch 180": Case(11318, 1, 512, 180, 0.05, 0.0),
    "SOP, N = 12": Case(11318, 12, 512, 32, 0.05, 0.0),
    "100,000 classes": Case(100_000, 1, 512, 32, 0.01, 0.0),
    "1,000,000 classes": Case(1_000_000, 1, 128, 32, 1000, 0.0),
}
BY_CLASSES = {f"C = {classes:,}": Case(classes, 1, 128, 32, 0.05, 0.0) for classes in (100, 1000, 10_000, 100_000)}
BY_CLASSES["C = 1,000,000"] = Case(1_000_000, 1, 128, 32, 5000, 0.0)
BY_BATCH = {f"B = {batch}": Case(11318, 1, 512, batch, 0.05, 0.0) for batch in (8, 32, 128, 512)}


def contenders(case: Case, *, all_of_them: bool = True) -> dict[str, Callable[[], None]]:
    """One forward and backward pass of each, by name; gradients are fresh in each, as after zero_grad().

    The plots show the fastest peer only.
    """
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    samples = torch.randn(case.batch, case.dimension, device=device, requires_grad=True)
    labels = torch.randint(case.classes, (case.batch,), device=device)
    settings = {"proxies_per_class": case.per_class, "proxy_weight": case.weight}
    settings |= {"links": case.links} if case.links >= 1 else {"ratio": case.links}

    def step(loss: Callable[[], Tensor], *parameters: Tensor) -> Callable[[], None]:
        def call() -> None:
            for parameter in (samples, *parameters):
                parameter.grad = None
            loss().backward()

        return call

    ours = ProxyGMLLoss(case.classes, case.dimension, **settings).to(device)
    calls = {"proxygml": step(lambda: ours(samples, labels), ours.proxies)}

    def like_ours(**options: object) -> ProxyGMLLoss:
        """With the same proxies; only the way to the gradient differs."""
        loss = ProxyGMLLoss(case.classes, case.dimension, **settings, **options).to(device)
        loss.proxies = ours.proxies
        return loss

    others = {"definition": {"implementation": "definition"}}
    if all_of_them and fits_fused(case.batch, ours.proxies, ours.settings):
        others["proxygml, chunked"] = {"implementation": "chunked"}
    if not case.weight:
        others["proxygml, sparse gradient"] = {"sparse_gradient": True}
    for name, options in others.items():
        loss = like_ours(**options)
        calls[name] = step(lambda loss=loss: loss(samples, labels), ours.proxies)
    peers: dict[str, Callable[[], torch.nn.Module]] = {
        "ArcFace (PML)": lambda: pml.ArcFaceLoss(case.classes, case.dimension),
    }
    if all_of_them and case.classes < 100_000:  # with more it takes a minute and is slower than ArcFace
        peers["Proxy-Anchor (PML)"] = lambda: pml.ProxyAnchorLoss(case.classes, case.dimension)
    if case.per_class > 1:
        peers = {
            "SoftTriple (PML)": lambda: pml.SoftTripleLoss(
                case.classes, case.dimension, centers_per_class=case.per_class
            ),
            "sub-center ArcFace (PML)": lambda: pml.SubCenterArcFaceLoss(
                num_classes=case.classes, embedding_size=case.dimension, sub_centers=case.per_class
            ),
        }
    for name, make in peers.items():
        peer = make().to(device)
        calls[name] = step(lambda peer=peer: peer(samples, labels), *peer.parameters())

    score_gradient = torch.ones(case.batch, case.classes * case.per_class, device=device)
    sums = torch.randn(case.classes, case.dimension, device=device)
    proxy_gradient = torch.ones(case.classes * case.per_class, case.classes, device=device) if case.weight else None

    @torch.no_grad()
    def products(*, normalized: bool) -> None:
        """Unit proxies, or their norms alone, and the products that make scores and gradients; nothing else."""
        proxies = ours.proxies.flatten(0, 1)
        if normalized:
            proxies = F.normalize(proxies, dim=1)
        else:
            torch.linalg.vector_norm(proxies, dim=1)
        samples @ proxies.T
        score_gradient @ proxies
        score_gradient.T @ samples
        if case.weight:
            proxies @ sums.T
            proxy_gradient @ sums
            proxy_gradient.T @ proxies

    return calls | {
        "normalization and products": partial(products, normalized=True),
        "norms and products": partial(products, normalized=False),
    }


def measure(case: Case, seconds: float, least: int = 3, *, all_of_them: bool = True) -> dict:
    """Time and memory of every contender."""
    calls = contenders(case, all_of_them=all_of_them)
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads or threads)
    found = take_turns(calls, seconds, least)
    torch.set_num_threads(threads)
    with patch.object(buffers, "LARGE", math.inf):  # all gradients in memory of torch's, which counts its own alone
        for name, call in calls.items():
            found[name]["mb"] = round(peak_megabytes(call), 2)
    del calls
    gc.collect()
    return {"case": case._asdict(), "contenders": found}


def show(title: str, found: dict) -> None:
    contenders = found["contenders"]
    ours = contenders["proxygml"]
    table = Table(title=title, title_justify="left", box=None)
    for column in ("", "median ms", "times ours", "quartiles", "peak MB", "times ours"):
        table.add_column(column, justify="right" if column else "left", no_wrap=not column)
    for name, entry in contenders.items():
        table.add_row(
            name,
            f"{entry['ms']:.1f}",
            f"{entry['times']:.2f}",
            f"{entry['times_low']:.2f} to {entry['times_high']:.2f}",
            f"{entry['mb']:.1f}",
            f"{entry['mb'] / ours['mb']:.2f}",
        )
    Console().print(table)
    Console().print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    numbered = ", ".join(f"{number} {name}" for number, name in enumerate(CASES))
    parser.add_argument("--only", nargs="+", type=int, help=f"these cases, and write nothing: {numbered}")
    options = parser.parse_args()
    seconds, least = (4, 3) if options.quick else (20, 8)
    if options.only:
        for name in (list(CASES)[number] for number in options.only):
            show(name, measure(CASES[name], seconds, least))
        return
    found: dict[str, dict] = {"cases": {}, "by_classes": {}, "by_batch": {}}
    for group, cases in (("cases", CASES), ("by_classes", BY_CLASSES), ("by_batch", BY_BATCH)):
        for name, case in cases.items():
            if group == "cases":
                found[group][name] = measure(case, seconds, least)
            else:
                found[group][name] = measure(case, seconds / 3, least=2, all_of_them=False)
            show(name, found[group][name])
    print(f"written: {save('loss', found)}")


if __name__ == "__main__":
    main()
