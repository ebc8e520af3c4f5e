"""A step of the optimizer on proxies of which a batch touches some: Adam's own loop, fused, and rows only.

    python -m benchmarks.optimizer [--quick]

Writes results/bench/optimizer.json, of which `python -m benchmarks.report` makes docs/performance.md.
"""

import argparse
import gc
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measuring import peak_megabytes, save, take_turns
from proxygml import RowAdam

CASES = {  # proxies, dimension, rows that a batch touches: what 32 samples link at r = 0.05, 0.01 and k = 1000
    "SOP": (11_318, 512, 9_000),
    "100,000 classes": (100_000, 512, 27_000),
    "1,000,000 classes": (1_000_000, 128, 31_000),
}
DECAY = {"lr": 3e-2, "eps": 1e-2, "weight_decay": 1e-4}


def contenders(proxies: int, dimension: int, touched: int) -> dict[str, Callable[[], None]]:
    """A step of each; all have proxies and moments of their own."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = torch.randperm(proxies, device=device)[:touched].sort().values
    values = torch.randn(touched, dimension, device=device)
    sparse = torch.sparse_coo_tensor(rows[None], values, (proxies, dimension), is_coalesced=True, check_invariants=True)

    def step(make: Callable[[list], torch.optim.Optimizer], gradient: torch.Tensor) -> Callable[[], None]:
        weights = torch.nn.Parameter(torch.randn(proxies, dimension, device=device))
        weights.grad = gradient
        return make([weights]).step

    dense = sparse.to_dense()
    return {
        "RowAdam, sparse gradient": step(lambda p: RowAdam(p, **DECAY), sparse),
        "torch.optim.SparseAdam (no decay)": step(lambda p: torch.optim.SparseAdam(p, lr=3e-2, eps=1e-2), sparse),
        "Adam, fused": step(lambda p: torch.optim.Adam(p, fused=True, **DECAY), dense),
        "Adam, as torch has it": step(lambda p: torch.optim.Adam(p, **DECAY), dense),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds: under a minute")
    seconds = 4 if parser.parse_args().quick else 20
    found = {}
    for name, (proxies, dimension, touched) in CASES.items():
        calls = contenders(proxies, dimension, touched)
        entries = take_turns(calls, seconds)
        for contender, call in calls.items():
            entries[contender]["mb"] = round(peak_megabytes(call), 2)
        del calls, call
        gc.collect()
        found[name] = {"proxies": proxies, "dimension": dimension, "touched": touched, "contenders": entries}
        table = Table(title=f"{name}, {touched:,} rows touched", title_justify="left", box=None)
        for column in ("", "median ms", "times RowAdam", "quartiles", "peak MB"):
            table.add_column(column, justify="right" if column else "left")
        for contender, entry in entries.items():
            spread = f"{entry['times_low']:.2f} to {entry['times_high']:.2f}"
            table.add_row(contender, f"{entry['ms']:.1f}", f"{entry['times']:.2f}", spread, f"{entry['mb']:.1f}")
        Console().print(table, "")
    print(f"written: {save('optimizer', {'cases': found})}")


if __name__ == "__main__":
    main()
