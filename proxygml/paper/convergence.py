"""How fast several methods learn: Recall@1 on the test classes over epochs and over training time."""

import statistics

from matplotlib.figure import Figure

from proxygml.paper.comparison import alike, variants
from proxygml.paper.drawing import starred
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import Claims, Results
from proxygml.paper.tables import Table

METHODS = ("proxygml", "softtriple", "proxy-nca", "proxy-anchor", "ms", "margin", "semihard", "hdml")
NEARLY = 0.95  # fraction of a run's highest Recall@1


def time_to_converge(run: dict) -> dict:
    """The first point of the curve with nearly the highest Recall@1."""
    highest = max(point["recall@1"] for point in run["curve"])
    return next(point for point in run["curve"] if point["recall@1"] >= NEARLY * highest)


def table(results: Results, dataset: str) -> Table:
    rows = []
    for name, runs in results.rows.items():
        points = [time_to_converge(run) for run in runs]
        epoch, seconds = (statistics.mean(point[key] for point in points) for key in ("epoch", "seconds"))
        rows.append((starred(name), str(results.range(name, "recall@1")), f"{epoch:.1f}", f"{seconds:.0f}"))
    return Table(("method", "R@1", f"epochs to {NEARLY:.0%} of the highest", "seconds to there"), tuple(rows))


def draw(results: Results, figure: Figure) -> None:
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


def claims(results: Results, dataset: str) -> Claims:
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


EXPERIMENT = Experiment(
    rows=lambda base: {name: alike(base, name) for name in METHODS} | variants(base),
    table=table,
    draw=draw,
    claims=claims,
    every_epoch=True,
    compares_times=True,
    partial_claims=True,
)
