"""Optimizer steps on proxies when a batch touches only some rows: RowAdam, SparseAdam, Adam and fused Adam.

    python -m benchmarks.optimizer [--quick]

Writes results/bench/optimizer.json; `python -m benchmarks.report` renders it in docs/performance.md.
"""

import argparse
import gc
from collections.abc import Callable

import torch

from benchmarks.profiling import peak_tensor_mb, print_table, save, time_interleaved
from proxygml import RowAdam

CASES = {  # proxies, dimension, rows touched by the links of 32 samples at r = 0.05, r = 0.01 and k = 1000
    "SOP": (11_318, 512, 9_000),
    "100,000 classes": (100_000, 512, 27_000),
    "1,000,000 classes": (1_000_000, 128, 31_000),
}
OPTIONS = {"lr": 3e-2, "eps": 1e-2, "weight_decay": 1e-4}


def contenders(proxies: int, dimension: int, touched: int) -> dict[str, Callable[[], None]]:
    """One step of each optimizer, on its own copy of the proxies."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = torch.randperm(proxies, device=device)[:touched].sort().values
    values = torch.randn(touched, dimension, device=device)
    sparse = torch.sparse_coo_tensor(rows[None], values, (proxies, dimension), is_coalesced=True, check_invariants=True)

    def step(build: Callable[[list], torch.optim.Optimizer], gradient: torch.Tensor) -> Callable[[], None]:
        weights = torch.nn.Parameter(torch.randn(proxies, dimension, device=device))
        weights.grad = gradient
        return build([weights]).step

    dense = sparse.to_dense()
    return {
        "RowAdam, sparse gradient": step(lambda p: RowAdam(p, **OPTIONS), sparse),
        "SparseAdam (no decay)": step(lambda p: torch.optim.SparseAdam(p, lr=3e-2, eps=1e-2), sparse),
        "Adam, fused": step(lambda p: torch.optim.Adam(p, fused=True, **OPTIONS), dense),
        "Adam, default": step(lambda p: torch.optim.Adam(p, **OPTIONS), dense),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under a minute")
    seconds = 4 if parser.parse_args().quick else 20
    results = {}
    for name, (proxies, dimension, touched) in CASES.items():
        calls = contenders(proxies, dimension, touched)
        timings = time_interleaved(calls, seconds)
        for contender, call in calls.items():
            timings[contender]["mb"] = round(peak_tensor_mb(call), 2)
        del calls, call
        gc.collect()
        results[name] = {"proxies": proxies, "dimension": dimension, "touched": touched, "contenders": timings}
        rows = [
            (
                contender,
                f"{t['ms']:.1f}",
                f"{t['ratio']:.2f}",
                f"{t['ratio_low']:.2f} to {t['ratio_high']:.2f}",
                f"{t['mb']:.1f}",
            )
            for contender, t in timings.items()
        ]
        columns = ("", "median ms", "relative to RowAdam", "quartiles", "peak MB")
        print_table(f"{name}, {touched:,} rows touched", columns, rows)
    print(f"written: {save('optimizer', {'cases': results})}")


if __name__ == "__main__":
    main()
