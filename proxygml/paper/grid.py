"""Numbers of proxies and ratios of links, in all combinations."""

import numpy as np
from matplotlib.figure import Figure

from proxygml.paper.experiment import Experiment
from proxygml.paper.proxies import best_of, combinations, named
from proxygml.paper.results import Claims, Results
from proxygml.paper.tables import Table

NUMBERS = (1, 4, 8, 12, 16)
RATIOS = (0.01, 0.05, 0.1, 0.5, 1.0)


def table(results: Results, dataset: str) -> Table:
    rows = [
        (f"r {ratio:g}", *(str(results.range(named(number, ratio), "recall@1")) for number in NUMBERS))
        for ratio in RATIOS
    ]
    return Table(("R@1", *(f"N {number}" for number in NUMBERS)), tuple(rows))


def draw(results: Results, figure: Figure) -> None:
    means = np.array([[results.range(named(number, ratio), "recall@1").mean for number in NUMBERS] for ratio in RATIOS])
    axis = figure.subplots()
    axis.imshow(means, cmap="viridis", aspect="auto")
    axis.set(xlabel="proxies of a class, N", ylabel="ratio linked, r", title="Recall@1, %")
    axis.set_xticks(range(len(NUMBERS)), list(map(str, NUMBERS)))
    axis.set_yticks(range(len(RATIOS)), list(map(str, RATIOS)))
    for (row, column), value in np.ndenumerate(means):
        dark = value < (np.nanmin(means) + np.nanmax(means)) / 2
        axis.text(column, row, f"{value:.1f}", ha="center", va="center", color="white" if dark else "black")


def claims(results: Results, dataset: str) -> Claims:
    full = named(12, 0.05)
    return {
        "N = 12 with r = 0.05 is best": best_of(results, full, list(results.rows)),
        "r = 0.01 is worse than r = 0.05 at N = 12": results.verdicts(full, named(12, 0.01)),
        "N = 1 with all linked is worse than N = 12 with r = 0.05": results.verdicts(full, named(1, 1.0)),
    }


EXPERIMENT = Experiment(
    remark="If r C N is below N, all links go to proxies of the sample's class, whatever r is: these cells are equal.",
    rows=lambda base: combinations(base, NUMBERS, RATIOS),
    table=table,
    draw=draw,
    claims=claims,
)
