"""Training steps with very many classes on one or several processes: time, memory per process, bytes exchanged.

    python -m benchmarks.scaling [--quick]

Classes are sharded over local processes that communicate by gloo. Bytes are counted on the loopback device, so nothing
else should use it. Writes results/bench/scaling.json; `python -m benchmarks.report` renders it in docs/scaling.md.
"""

import argparse
import json
import os
import re
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn

from benchmarks import million_images
from benchmarks.profiling import load, peak_resident_mb, save, time_summary
from proxygml import ProxyGMLSettings, RowAdam, ShardedProxyGMLLoss
from proxygml.paper.tables import Table

BATCH, DIMENSION, LINKS = 64, 128, 1000
STEPS, WARM_UP = 20, 3
PAGE = Path("docs/scaling.md")
MILLION_CLASSES = Path("results/million_classes")
TEMPLATE = Path(__file__).with_name("scaling.md")


def train_steps(rank: int, processes: int, classes: int, folder: str) -> None:
    """Train for some steps as process `rank` and save the measurements."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=processes)
    torch.manual_seed(0)
    before = peak_resident_mb()
    settings = ProxyGMLSettings(proxies_per_class=1, links=LINKS, proxy_weight=0.0, sparse_gradient=True)
    loss = ShardedProxyGMLLoss(classes, DIMENSION, settings)
    network = nn.parallel.DistributedDataParallel(nn.Linear(DIMENSION, DIMENSION, bias=False))
    optimizer = RowAdam([*network.parameters(), *loss.parameters()], lr=1e-3, fused=True)
    times, bytes_before = [], 0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            dist.barrier()
            bytes_before = loopback_bytes()
        started = time.perf_counter()
        features, labels = torch.randn(BATCH // processes, DIMENSION), torch.randint(classes, (BATCH // processes,))
        value = loss(network(features), labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step >= WARM_UP:
            times.append(1000 * (time.perf_counter() - started))
    dist.barrier()
    measured = {"mb": peak_resident_mb() - before, "bytes": (loopback_bytes() - bytes_before) / STEPS}
    torch.save(time_summary(times) | measured, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def loopback_bytes() -> int:
    """Bytes received by the loopback device since boot."""
    return int(re.search(r"\blo:\s*(\d+)", Path("/proc/net/dev").read_text()).group(1))


def bytes_by_formula(processes: int) -> int:
    """Bytes that all W processes receive in a step: (W - 1) times all_gather plus 2 (W - 1) times all_reduce.

    all_gather: embeddings and labels. all_reduce: for each sample four histograms of 256 counts, the maximum and four
    sums of its softmax, and its gradient; and the gradient of the network. Neither classes nor links matter.
    """
    gathered = BATCH * (4 * DIMENSION + 8 + 8)
    reduced = 4 * BATCH * (4 * 256 + 1 + 4 + DIMENSION) + 4 * DIMENSION * DIMENSION
    return (processes - 1) * (gathered + 2 * reduced)


def measure(classes: int, processes: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(train_steps, (processes, classes, folder), nprocs=processes)
        results = [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(processes)]
    return results[0] | {
        "classes": classes,
        "processes": processes,
        "mb": round(max(process["mb"] for process in results)),
        "bytes": round(results[0]["bytes"]),
        "bytes_by_formula": bytes_by_formula(processes),
    }


def table(cases: list[dict]) -> Table:
    rows = [
        (
            f"{case['classes']:,}",
            str(case["processes"]),
            f"{case['ms']:.0f}",
            f"{case['low']:.0f}-{case['high']:.0f}",
            f"{case['mb']:,}",
            f"{case['bytes']:,}" if case["processes"] > 1 else "-",
            f"{case['bytes_by_formula']:,}" if case["processes"] > 1 else "-",
        )
        for case in cases
    ]
    columns = ("classes", "processes", "ms per step", "quartiles", "MB per process", "bytes per step", "predicted")
    return Table(columns, tuple(rows))


def page() -> str:
    """The text of docs/scaling.md."""
    results = load("scaling")
    values = {
        "{sharded}": table(results["cases"]).to_markdown(),
        "{machine}": results["made_by"]["machine"],
        "{million_classes}": million_classes_table().to_markdown(),
        "{million_images}": million_images.table(load("million_images")).to_markdown(),
    }
    text = TEMPLATE.read_text()
    for name, value in values.items():
        text = text.replace(name, value)
    return text.rstrip("\n") + "\n"


def million_classes_table() -> Table:
    """The logs of examples/million_classes.py with one and two processes."""
    logs = [json.loads((MILLION_CLASSES / f"{processes}.json").read_text())["log"] for processes in (1, 2)]
    rows = []
    for one, two in list(zip(*logs, strict=True))[::2]:
        cells = [
            cell
            for entry in (one, two)
            for cell in (f"{entry['seconds']:.0f}", f"{100 * entry['recall@1']:.1f}", f"{entry['gigabytes']:.2f}")
        ]
        rows.append((str(one["step"]), *cells))
    columns = ("s", "Recall@1, %", "GB")
    named = [f"{column} ({processes})" for processes in (1, 2) for column in columns]
    return Table(("step", *named), tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few classes, half a minute; writes nothing")
    options = parser.parse_args()
    sizes = (10_000,) if options.quick else (100_000, 300_000, 1_000_000)
    cases = [measure(classes, processes) for classes in sizes for processes in ((1, 2) if options.quick else (1, 2, 4))]
    print(table(cases).to_markdown())
    if not options.quick:
        print(f"written: {save('scaling', {'cases': cases})}")


if __name__ == "__main__":
    main()
