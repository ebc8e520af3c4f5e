"""How many of the proxies each sample should be linked to, at N = 12."""

from matplotlib.figure import Figure

from proxygml.paper.drawing import draw_series, scores_table
from proxygml.paper.experiment import Experiment
from proxygml.paper.proxies import combinations, named
from proxygml.paper.results import Claims, Results
from proxygml.training.recipe import Recipe

RATIOS = (0.01, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
CLAIMED = 0.05
NARROWING = "N 12, r from 1 to 0.05"  # ours, not the paper's


def rows(base: Recipe) -> dict[str, Recipe]:
    narrowing = base.changed({"proxies_per_class": 12, "ratio": CLAIMED, "start_ratio": 1.0})
    return combinations(base, (12,), RATIOS) | {NARROWING: narrowing}


def draw(results: Results, figure: Figure) -> None:
    axis = figure.subplots()
    axis.set_xscale("log")
    axis.minorticks_off()
    series = {"N = 12": {ratio: named(12, ratio) for ratio in RATIOS}}
    draw_series(axis, results, series, "ratio linked, r, at N = 12")
    if NARROWING in results.rows:
        mean = results.range(NARROWING, "recall@1").mean
        axis.axhline(mean, linestyle=":", color="#d73027", label="r from 1 to 0.05")
        axis.legend()


def claims(results: Results, dataset: str) -> Claims:
    return {
        f"r = {CLAIMED} is better than r = {ratio:g}": results.verdicts(named(12, CLAIMED), named(12, ratio))
        for ratio in RATIOS
        if ratio != CLAIMED and {named(12, CLAIMED), named(12, ratio)} <= results.rows.keys()
    }


EXPERIMENT = Experiment(
    rows=rows,
    table=lambda results, dataset: scores_table(results, "ratio linked"),
    draw=draw,
    claims=claims,
    partial_claims=True,
)
