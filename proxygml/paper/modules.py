"""Gains from the positive mask, the mask softmax and the regularizer on proxies, alone and together."""

from matplotlib.figure import Figure

from proxygml.paper.drawing import draw_ranges
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import Results
from proxygml.paper.tables import Table
from proxygml.training.recipe import Recipe

ROWS = {  # S^pos, M, L^p; NMI and Recall@1 of the paper, on Cars196
    "1 none": (False, False, False, 52.1, 47.3),
    "2 S^pos": (True, False, False, 69.6, 83.3),
    "3 M": (False, True, False, 54.9, 66.1),
    "4 L^p": (False, False, True, 67.1, 81.7),
    "5 M, L^p": (False, True, True, 68.8, 82.6),
    "6 S^pos, L^p": (True, False, True, 71.6, 84.5),
    "7 S^pos, M": (True, True, False, 70.7, 84.0),
    "8 all three": (True, True, True, 72.4, 85.5),
}
CLAIMS = {  # the better row, the other
    "the positive mask helps the base loss": ("2 S^pos", "1 none"),
    "the mask softmax helps the base loss": ("3 M", "1 none"),
    "the regularizer helps the base loss": ("4 L^p", "1 none"),
    "all three are better than without the positive mask": ("8 all three", "5 M, L^p"),
    "all three are better than without the mask softmax": ("8 all three", "6 S^pos, L^p"),
    "all three are better than without the regularizer": ("8 all three", "7 S^pos, M"),
}


def rows(base: Recipe) -> dict[str, Recipe]:
    """Lambda is 0 without L^p, and 0.3 with it where the preset has none (Stanford Online Products)."""
    weight = base.proxy_weight or 0.3
    return {
        name: base.changed({"positive_mask": mask, "mask_softmax": softmax, "proxy_weight": weight if proxies else 0.0})
        for name, (mask, softmax, proxies, _, _) in ROWS.items()
    }


def table(results: Results, dataset: str) -> Table:
    columns = ("modules", "NMI", "R@1", "paper, Cars196: NMI", "paper, Cars196: R@1")
    rows = [(name, *results.cells(name, "nmi", "recall@1"), *map(str, ROWS[name][3:])) for name in results.rows]
    return Table(columns, tuple(rows))


def draw(results: Results, figure: Figure) -> None:
    for axis, metric, label in zip(figure.subplots(1, 2), ("nmi", "recall@1"), ("NMI, %", "Recall@1, %"), strict=True):
        draw_ranges(axis, {name: results.range(name, metric) for name in results.rows}, label)


EXPERIMENT = Experiment(
    seeds=5,
    rows=rows,
    table=table,
    draw=draw,
    claims=lambda results, dataset: {claim: results.verdicts(*pair) for claim, pair in CLAIMS.items()},
)
