"""Time and memory of a training step of each method relative to ProxyGML, measured one after another."""

import math
import resource
import statistics
from pathlib import Path

import torch
from matplotlib.figure import Figure

from proxygml.paper.comparison import every_method
from proxygml.paper.convergence import time_to_converge
from proxygml.paper.drawing import draw_ranges, starred
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import Claims, Range, Results
from proxygml.paper.running import summary
from proxygml.paper.tables import Table
from proxygml.training.recipe import Recipe
from proxygml.training.start import train

MEASURED = {"step_seconds": "time of a step", "convergence_seconds": "time to converge", "memory_mb": "memory"}
PAPER = {  # seconds of a step, hours to convergence, GB; Cars196 on a TITAN Xp
    "semihard": (0.48, 1.01, 4.90),
    "margin": (0.56, 1.12, 4.90),
    "proxy-nca": (0.17, 0.51, 1.54),
    "hdml": (1.1, 2.25, 8.96),
    "ms": (0.75, 0.88, 3.52),
    "proxygml": (0.23, 0.81, 2.18),
}


def measure(recipe: Recipe, folder: Path) -> dict:
    """Seconds of a step (after the first epoch), seconds to convergence, memory above that of an idle process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    run = train(recipe, folder)
    steps = [recipe.batch_size / entry["images_per_second"] for entry in run.log[1:] or run.log]
    memory = run.log[0]["peak_memory_mb"] - (0 if torch.cuda.is_available() else before)  # before scoring
    memory = max(memory, 0.1)  # a process that trained before, as with --quick, may not grow
    return {
        "step_seconds": statistics.median(steps),
        "convergence_seconds": time_to_converge(summary(run))["seconds"],
        "memory_mb": round(memory, 1),
    }


def _ratio(results: Results, name: str, key: str) -> Range:
    """Median over rounds relative to ProxyGML, with half the range if there are several."""
    ours = statistics.median(run[key] for run in results.rows["proxygml"])
    multiples = [run[key] / ours for run in results.rows[name]]
    spread = (max(multiples) - min(multiples)) / 2 if len(multiples) > 1 else math.nan
    return Range(statistics.median(multiples), spread)


def table(results: Results, dataset: str) -> Table:
    rows = []
    for name, runs in results.rows.items():
        milliseconds = 1000 * statistics.median(run["step_seconds"] for run in runs)
        ratios = [f"{_ratio(results, name, key):.2f}" for key in MEASURED]
        pairs = zip(PAPER.get(name, ()), PAPER["proxygml"], strict=False)
        theirs = [f"{one / ours:.2f}" for one, ours in pairs] or ["-"] * 3
        rows.append((starred(name), f"{milliseconds:.1f}", *ratios, *theirs))
    columns = [f"{what}, ratio to ProxyGML" for what in MEASURED.values()]
    return Table(("method", "ms a step", *columns, *(f"paper: {what}" for what in MEASURED.values())), tuple(rows))


def draw(results: Results, figure: Figure) -> None:
    for axis, (key, label) in zip(figure.subplots(1, 3, sharey=True), MEASURED.items(), strict=True):
        ratios = {starred(name): _ratio(results, name, key) for name in results.rows}
        draw_ranges(axis, ratios, f"{label},\nratio to ProxyGML")
        axis.axvline(1, color="#4d4d4d", linewidth=1)


def claims(results: Results, dataset: str) -> Claims:
    def judged(here: float, theirs: float) -> str:
        """Whether a method takes more than ProxyGML, or less, as in the paper."""
        return ("holds in kind" if (here > 1) == (theirs > 1) else "**does not hold**") + f" (here {here:.2f} times)"

    return {
        f"{what} of {name} is {theirs / ours:.2f} times that of ProxyGML": {
            "measured": judged(_ratio(results, name, key).mean, theirs / ours)
        }
        for name in PAPER
        if name != "proxygml" and name in results.rows
        for (key, what), theirs, ours in zip(MEASURED.items(), PAPER[name], PAPER["proxygml"], strict=True)
    }


EXPERIMENT = Experiment(
    remark="All methods use the same batch size and nothing else runs. Times to converge are of these runs, "
    "those in the section convergence of other runs.",
    rows=every_method,
    table=table,
    draw=draw,
    claims=claims,
    measure=measure,
    every_epoch=True,
    compares_times=True,
    paper_rows=tuple(PAPER),
)
