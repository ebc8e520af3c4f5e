"""What a step of each method costs in time and memory, beside ProxyGML's, measured one after another in one go."""

import resource
import statistics
from pathlib import Path

import torch
from matplotlib.figure import Figure

from proxygml import losses, training
from proxygml.experiments.comparison import fair
from proxygml.experiments.drawing import draw_bars
from proxygml.experiments.found import Found, Range
from proxygml.experiments.tables import Table
from proxygml.recipes import Recipe

IN_THE_PAPER = "supplement, Table 1"
PAPER = {  # seconds of a step, hours to convergence, GB; Cars196 on a TITAN Xp
    "semihard": (0.48, 1.01, 4.90),
    "margin": (0.56, 1.12, 4.90),
    "proxy-nca": (0.17, 0.51, 1.54),
    "hdml": (1.1, 2.25, 8.96),
    "ms": (0.75, 0.88, 3.52),
    "proxygml": (0.23, 0.81, 2.18),
}


def arms(base: Recipe) -> dict[str, Recipe]:
    """Two short epochs, the first to warm up."""
    short = {"epochs": 2, "tested_epochs": (), "held_out": 0.0, "test": False}
    return {name: fair(base, name).changed(short) for name in losses.METHODS}


def measure(recipe: Recipe, folder: Path) -> dict:
    """Seconds of a step in the second epoch, and by how much memory grew above the empty process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    entry = training.train(recipe, folder).log[-1]
    memory = entry["peak_memory_mb"] - (0 if torch.cuda.is_available() else before)
    return {"step_seconds": recipe.batch_size / entry["images_per_second"], "memory_mb": round(memory, 1)}


def _ratio(found: Found, name: str, key: str) -> Range:
    """Median over rounds, multiple of ProxyGML's, and half the distance between the extremes."""
    ours = statistics.median(run[key] for run in found.arms["proxygml"])
    multiples = [run[key] / ours for run in found.arms[name]]
    return Range(statistics.median(multiples), (max(multiples) - min(multiples)) / 2)


def table(found: Found, dataset: str) -> Table:
    rows = []
    for name, runs in found.arms.items():
        cells = [f"{1000 * statistics.median(run['step_seconds'] for run in runs):.1f}"]
        for key in ("step_seconds", "memory_mb"):
            ratio = _ratio(found, name, key)
            cells.append(f"{ratio.mean:.2f} ± {ratio.half_width:.2f}")
        step, _, memory = PAPER.get(name, (None, None, None))
        theirs = [f"{step / PAPER['proxygml'][0]:.2f}", f"{memory / PAPER['proxygml'][2]:.2f}"] if step else ["-", "-"]
        rows.append((name, *cells, *theirs))
    columns = (
        "method",
        "ms a step",
        "time, ratio to ProxyGML",
        "memory, ratio",
        "paper: time, ratio",
        "paper: memory, ratio",
    )
    return Table(columns, tuple(rows))


def draw(found: Found, figure: Figure) -> None:
    for axis, key, label in zip(
        figure.subplots(1, 2, sharey=True), ("step_seconds", "memory_mb"), ("time of a step", "memory"), strict=True
    ):
        draw_bars(axis, {name: _ratio(found, name, key) for name in found.arms}, f"{label}, multiple of ProxyGML's")
        axis.axvline(1, color="#4d4d4d", linewidth=1)


def claims(found: Found) -> dict[str, str]:
    def compared(name: str, key: str) -> str:
        return f"{_ratio(found, name, key).mean:.2f} times"

    return {
        f"a step of {name} takes {PAPER[name][0] / PAPER['proxygml'][0]:.2f} times that of ProxyGML": (
            f"here {compared(name, 'step_seconds')}, in equal batches"
        )
        for name in PAPER
        if name != "proxygml" and name in found.arms
    }
