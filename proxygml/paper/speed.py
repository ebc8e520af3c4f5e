"""How fast several methods learn, and what a training step of each costs."""

import math
import resource
import statistics
from pathlib import Path

import torch
from matplotlib.figure import Figure

from proxygml.paper.comparison import alike, every_method, variants
from proxygml.paper.drawing import draw_ranges, starred
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import Claims, Range, Results
from proxygml.paper.running import summary
from proxygml.paper.tables import Table
from proxygml.training.recipe import Recipe
from proxygml.training.start import train

METHODS = ("proxygml", "softtriple", "proxy-nca", "proxy-anchor", "ms", "margin", "semihard", "hdml")
NEARLY = 0.95  # fraction of a run's highest Recall@1


def time_to_converge(run: dict) -> dict:
    """The first point of the curve with nearly the highest Recall@1."""
    highest = max(point["recall@1"] for point in run["curve"])
    return next(point for point in run["curve"] if point["recall@1"] >= NEARLY * highest)


def convergence_table(results: Results, dataset: str) -> Table:
    rows = []
    for name, runs in results.rows.items():
        points = [time_to_converge(run) for run in runs]
        epoch, seconds = (statistics.mean(point[key] for point in points) for key in ("epoch", "seconds"))
        rows.append((starred(name), str(results.range(name, "recall@1")), f"{epoch:.1f}", f"{seconds:.0f}"))
    return Table(("method", "R@1", f"epochs to {NEARLY:.0%} of the highest", "seconds to there"), tuple(rows))


def convergence_draw(results: Results, figure: Figure) -> None:
    for axis, key, label in zip(
        figure.subplots(1, 2, sharey=True), ("epoch", "seconds"), ("epoch", "seconds of training"), strict=True
    ):
        for name, runs in results.rows.items():
            points = list(zip(*(run["curve"] for run in runs), strict=False))  # the same epoch of all seeds
            across = [statistics.mean(point[key] for point in same) for same in points]
            heights = [100 * statistics.mean(point["recall@1"] for point in same) for same in points]
            axis.plot(across, heights, marker=".", linewidth=3 if name == "proxygml" else 1.2, label=starred(name))
        axis.set(xlabel=label)
    figure.axes[0].set(ylabel="Recall@1 on test classes, %")
    figure.axes[1].legend()


def convergence_claims(results: Results, dataset: str) -> Claims:
    def mean_seconds(name: str) -> float:
        return statistics.mean(time_to_converge(run)["seconds"] for run in results.rows[name])

    if "proxygml" not in results.rows:
        return {}
    ours = mean_seconds("proxygml")
    others = [name for name in METHODS if name in results.rows and name not in ("proxygml", "proxy-nca")]
    return {
        f"ProxyGML converges faster than {name}": {
            "time": ("holds" if mean_seconds(name) > ours else "**does not hold**")
            + f" ({mean_seconds(name) / ours:.2f} times ours)"
        }
        for name in others
    } | {f"ProxyGML ends higher than {name}": results.verdicts("proxygml", name) for name in others}


CONVERGENCE = Experiment(
    rows=lambda base: {name: alike(base, name) for name in METHODS} | variants(base),
    table=convergence_table,
    draw=convergence_draw,
    claims=convergence_claims,
    every_epoch=True,
    partial_claims=True,
)


# Supplement, Table 1

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


def cost_table(results: Results, dataset: str) -> Table:
    rows = []
    for name, runs in results.rows.items():
        milliseconds = 1000 * statistics.median(run["step_seconds"] for run in runs)
        ratios = [f"{_ratio(results, name, key):.2f}" for key in MEASURED]
        pairs = zip(PAPER.get(name, ()), PAPER["proxygml"], strict=False)
        theirs = [f"{one / ours:.2f}" for one, ours in pairs] or ["-"] * 3
        rows.append((starred(name), f"{milliseconds:.1f}", *ratios, *theirs))
    columns = [f"{what}, ratio to ProxyGML" for what in MEASURED.values()]
    return Table(("method", "ms a step", *columns, *(f"paper: {what}" for what in MEASURED.values())), tuple(rows))


def cost_draw(results: Results, figure: Figure) -> None:
    for axis, (key, label) in zip(figure.subplots(1, 3, sharey=True), MEASURED.items(), strict=True):
        ratios = {starred(name): _ratio(results, name, key) for name in results.rows}
        draw_ranges(axis, ratios, f"{label},\nratio to ProxyGML")
        axis.axvline(1, color="#4d4d4d", linewidth=1)


def cost_claims(results: Results, dataset: str) -> Claims:
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


COST = Experiment(
    remark="All methods use the same batch size and nothing else runs. Times to converge are of these runs, "
    "those in the section convergence of other runs.",
    rows=every_method,
    table=cost_table,
    draw=cost_draw,
    claims=cost_claims,
    measure=measure,
    every_epoch=True,
    paper_rows=tuple(PAPER),
)
