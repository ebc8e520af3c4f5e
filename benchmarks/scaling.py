"""A step with very many classes on one or several processes: time, memory of each process, bytes between them.

    python -m benchmarks.scaling [--quick]

Classes are spread over processes on this machine that talk by gloo; bytes are those of its loopback device, so nothing
else should use it. Writes results/bench/scaling.json, of which `python -m benchmarks.report` makes docs/scaling.md.
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
from rich.console import Console
from torch import nn

from benchmarks import million_images
from benchmarks.measuring import load, save, spread
from proxygml import ProxyGMLSettings, RowAdam, ShardedProxyGMLLoss
from proxygml.experiments.tables import Table

BATCH, DIMENSION, LINKS = 64, 128, 1000
STEPS, WARM_UP = 20, 3
PAGE = Path("docs/scaling.md")
MILLION = Path("results/million_classes")
TEXT = Path(__file__).with_name("scaling.md")


def work(rank: int, processes: int, classes: int, folder: str) -> None:
    """Some steps of training, as one of the processes."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=processes)
    torch.manual_seed(0)
    before = megabytes()
    settings = ProxyGMLSettings(proxies_per_class=1, links=LINKS, proxy_weight=0.0, sparse_gradient=True)
    loss = ShardedProxyGMLLoss(classes, DIMENSION, settings)
    network = nn.parallel.DistributedDataParallel(nn.Linear(DIMENSION, DIMENSION, bias=False))
    optimizer = RowAdam([*network.parameters(), *loss.parameters()], lr=1e-3, fused=True)
    times, sent = [], 0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            dist.barrier()
            sent = loopback_bytes()
        began = time.perf_counter()
        features, labels = torch.randn(BATCH // processes, DIMENSION), torch.randint(classes, (BATCH // processes,))
        value = loss(network(features), labels)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        if step >= WARM_UP:
            times.append(1000 * (time.perf_counter() - began))
    dist.barrier()
    found = spread(times) | {"mb": megabytes() - before, "bytes": (loopback_bytes() - sent) / STEPS}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def megabytes() -> float:
    """The most memory that this process has held."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text()).group(1)) / 1024


def loopback_bytes() -> int:
    """Received by the loopback device since the machine was started."""
    return int(re.search(r"\blo:\s*(\d+)", Path("/proc/net/dev").read_text()).group(1))


def bytes_by_formula(processes: int) -> int:
    """Of a step, of all processes together: what they gather, (W - 1) times, and what they add up, 2 (W - 1) times.

    Embeddings and labels are gathered; added up are four tables of 256 counts for each sample, the maximum and four
    numbers of its softmax, its gradient, and the gradient of the network. Neither classes nor links are in it.
    """
    gathered = BATCH * (4 * DIMENSION + 8 + 8)
    added_up = 4 * BATCH * (4 * 256 + 1 + 4 + DIMENSION) + 4 * DIMENSION * DIMENSION
    return (processes - 1) * (gathered + 2 * added_up)


def measure(classes: int, processes: int) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (processes, classes, folder), nprocs=processes)
        found = [torch.load(f"{folder}/{rank}.pt", weights_only=True) for rank in range(processes)]
    return found[0] | {
        "classes": classes,
        "processes": processes,
        "mb": round(max(process["mb"] for process in found)),
        "bytes": round(found[0]["bytes"]),
        "bytes_by_formula": bytes_by_formula(processes),
    }


def table(cases: list[dict]) -> Table:
    rows = [
        (
            f"{case['classes']:,}",
            str(case["processes"]),
            f"{case['ms']:.0f}",
            f"{case['low']:.0f} to {case['high']:.0f}",
            f"{case['mb']:,}",
            f"{case['bytes']:,}" if case["processes"] > 1 else "-",
            f"{case['bytes_by_formula']:,}" if case["processes"] > 1 else "-",
        )
        for case in cases
    ]
    columns = ("classes", "processes", "ms a step", "quartiles", "MB of a process", "bytes of a step", "by the formula")
    return Table(columns, tuple(rows))


def page() -> str:
    """The whole of docs/scaling.md."""
    found = load("scaling")
    filled = {
        "{table}": table(found["cases"]).to_markdown(),
        "{machine}": found["made_by"]["machine"],
        "{million}": million().to_markdown(),
        "{images}": million_images.table(load("million_images")).to_markdown(),
    }
    text = TEXT.read_text()
    for place, contents in filled.items():
        text = text.replace(place, contents)
    return text


def million() -> Table:
    """What examples/million_classes.py found, on one process and on two."""
    logs = [json.loads((MILLION / f"{processes}.json").read_text())["log"] for processes in (1, 2)]
    rows = []
    for one, two in zip(*logs, strict=True):
        cells = [
            cell
            for entry in (one, two)
            for cell in (f"{entry['seconds']:.0f}", f"{100 * entry['recall@1']:.1f}", f"{entry['gigabytes']:.2f}")
        ]
        rows.append((str(one["step"]), *cells))
    columns = ("s", "Recall@1, %", "GB")
    named = [f"{processes}: {column}" for processes in ("one process", "two processes") for column in columns]
    return Table(("step", *named), tuple(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few classes, and nothing is written: half a minute")
    options = parser.parse_args()
    sizes = (10_000,) if options.quick else (100_000, 300_000, 1_000_000)
    cases = [measure(classes, processes) for classes in sizes for processes in ((1, 2) if options.quick else (1, 2, 4))]
    Console(width=200).print(table(cases).to_markdown(), highlight=False)
    if not options.quick:
        print(f"written: {save('scaling', {'cases': cases})}")


if __name__ == "__main__":
    main()
