"""How many of the proxies each sample should be linked to, at N = 12."""

from matplotlib.figure import Figure

from proxygml.paper.drawing import draw_series, scores_table
from proxygml.paper.proxies import combinations, named
from proxygml.paper.results import Claims, Results
from proxygml.paper.tables import Table
from proxygml.training.recipe import Recipe

IN_THE_PAPER = "Figure 5"
RATIOS = (0.01, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)
CLAIMED = 0.05
PAIRS = True
NARROWING = "N 12, r from 1 to 0.05"  # ours, not the paper's
FROM_ONE = {"ratio": CLAIMED, "start_ratio": 1.0}


def rows(base: Recipe) -> dict[str, Recipe]:
    return combinations(base, (12,), RATIOS) | {NARROWING: base.changed({"proxies_per_class": 12, **FROM_ONE})}


def table(results: Results, dataset: str) -> Table:
    return scores_table(results, "ratio linked")


def draw(results: Results, figure: Figure) -> None:
    axis = figure.subplots()
    axis.set_xscale("log")
    axis.minorticks_off()
    draw_series(
        axis, results, [("N = 12", {ratio: named(12, ratio) for ratio in RATIOS})], "ratio linked, r, at N = 12"
    )
    if NARROWING in results.rows:
        axis.axhline(
            results.range(NARROWING, "recall@1").mean, linestyle=":", color="#d73027", label="r from 1 to 0.05"
        )
        axis.legend()


def claims(results: Results, dataset: str) -> Claims:
    others = [ratio for ratio in RATIOS if ratio != CLAIMED and named(12, ratio) in results.rows]
    return {
        f"r = {CLAIMED} is better than r = {ratio:g}": results.verdicts(named(12, CLAIMED), named(12, ratio))
        for ratio in others
        if named(12, CLAIMED) in results.rows
    }
