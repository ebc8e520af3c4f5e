"""Forward and backward of the loss, compared with its definition, other losses and the necessary matrix products.

    python -m benchmarks.loss [--quick] [--only 0 2]

Writes results/bench/loss.json; `python -m benchmarks.report` renders it in docs/performance.md.
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
from torch import Tensor

from benchmarks.profiling import peak_tensor_mb, print_table, save, time_interleaved
from proxygml import ProxyGMLLoss
from proxygml.losses.proxygml import buffers
from proxygml.losses.proxygml.fused import fits_fused


class Case(NamedTuple):
    classes: int
    per_class: int
    dimension: int
    batch: int
    links: float  # below 1: a fraction of all proxies
    weight: float  # of the regularizer
    threads: int | None = None  # None: all


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


def contenders(case: Case, *, fastest_only: bool = False) -> dict[str, Callable[[], None]]:
    """Forward and backward pass of each contender, by name; `fastest_only` omits slower variants (for the plots)."""
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

    variants = {"definition": {"implementation": "definition"}}
    if not fastest_only and fits_fused(case.batch, ours.proxies, ours.settings):
        variants["proxygml, chunked"] = {"implementation": "chunked"}
    if not case.weight:
        variants["proxygml, sparse gradient"] = {"sparse_gradient": True}
    for name, options in variants.items():
        loss = ProxyGMLLoss(case.classes, case.dimension, **settings, **options).to(device)
        loss.proxies = ours.proxies
        calls[name] = step(lambda loss=loss: loss(samples, labels), ours.proxies)
    peers: dict[str, Callable[[], torch.nn.Module]] = {
        "ArcFace (PML)": lambda: pml.ArcFaceLoss(case.classes, case.dimension),
    }
    if not fastest_only and case.classes < 100_000:  # with more it takes a minute and is slower than ArcFace
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
    for name, build in peers.items():
        peer = build().to(device)
        calls[name] = step(lambda peer=peer: peer(samples, labels), *peer.parameters())

    score_gradient = torch.ones(case.batch, case.classes * case.per_class, device=device)
    sums = torch.randn(case.classes, case.dimension, device=device)
    proxy_gradient = torch.ones(case.classes * case.per_class, case.classes, device=device) if case.weight else None

    @torch.no_grad()
    def products(*, normalized: bool) -> None:
        """Normalize the proxies, or compute only their norms; then the matrix products of scores and gradients."""
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


def measure(case: Case, seconds: float, min_rounds: int = 3, *, fastest_only: bool = False) -> dict:
    """Time and memory of every contender."""
    calls = contenders(case, fastest_only=fastest_only)
    threads = torch.get_num_threads()
    torch.set_num_threads(case.threads or threads)
    timings = time_interleaved(calls, seconds, min_rounds)
    torch.set_num_threads(threads)
    with patch.object(buffers, "LARGE", math.inf):  # the profiler sees only memory of torch's allocator
        for name, call in calls.items():
            timings[name]["mb"] = round(peak_tensor_mb(call), 2)
    del calls
    gc.collect()
    return {"case": case._asdict(), "contenders": timings}


def show(title: str, timings: dict[str, dict]) -> None:
    rows = [
        (
            name,
            f"{timing['ms']:.1f}",
            f"{timing['ratio']:.2f}",
            f"{timing['ratio_low']:.2f} to {timing['ratio_high']:.2f}",
            f"{timing['mb']:.1f}",
            f"{timing['mb'] / timings['proxygml']['mb']:.2f}",
        )
        for name, timing in timings.items()
    ]
    print_table(title, ("", "median ms", "relative", "quartiles", "peak MB", "relative"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    numbered = ", ".join(f"{number} {name}" for number, name in enumerate(CASES))
    parser.add_argument("--only", nargs="+", type=int, help=f"run these cases and write nothing: {numbered}")
    options = parser.parse_args()
    seconds, min_rounds = (4, 3) if options.quick else (20, 8)
    if options.only:
        for name in (list(CASES)[number] for number in options.only):
            show(name, measure(CASES[name], seconds, min_rounds)["contenders"])
        return
    results: dict[str, dict] = {"cases": {}, "by_classes": {}, "by_batch": {}}
    for group, cases in (("cases", CASES), ("by_classes", BY_CLASSES), ("by_batch", BY_BATCH)):
        for name, case in cases.items():
            if group == "cases":
                results[group][name] = measure(case, seconds, min_rounds)
            else:
                results[group][name] = measure(case, seconds / 3, min_rounds=2, fastest_only=True)
            show(name, results[group][name]["contenders"])
    print(f"written: {save('loss', results)}")


if __name__ == "__main__":
    main()
