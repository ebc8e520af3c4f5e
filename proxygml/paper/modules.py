"""Gains from the positive mask, the mask softmax and the regularizer on proxies, alone and together."""

from matplotlib.figure import Figure

from proxygml.paper.drawing import draw_ranges
from proxygml.paper.results import Claims, Results
from proxygml.paper.tables import Table
from proxygml.training.recipe import Recipe

IN_THE_PAPER = "Table 1"
SEEDS = 5
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


def rows(base: Recipe) -> dict[str, Recipe]:
    """Lambda is 0 without L^p, and 0.3 with it where the preset has none (Stanford Online Products)."""
    weight = base.proxy_weight or 0.3
    return {
        name: base.changed({"positive_mask": mask, "mask_softmax": softmax, "proxy_weight": weight if proxies else 0.0})
        for name, (mask, softmax, proxies, _, _) in ROWS.items()
    }


def table(results: Results, dataset: str) -> Table:
    columns = ("modules", "NMI", "R@1", "paper, Cars196: NMI", "paper, Cars196: R@1")
    rows = [
        (name, str(results.range(name, "nmi")), str(results.range(name, "recall@1")), f"{nmi}", f"{recall}")
        for name, (_, _, _, nmi, recall) in ROWS.items()
        if name in results.rows
    ]
    return Table(columns, tuple(rows))


def draw(results: Results, figure: Figure) -> None:
    for axis, metric, label in zip(figure.subplots(1, 2), ("nmi", "recall@1"), ("NMI, %", "Recall@1, %"), strict=True):
        draw_ranges(axis, {name: results.range(name, metric) for name in results.rows}, label)


def claims(results: Results, dataset: str) -> Claims:
    full = "8 all three"
    pairs = {
        "the positive mask helps the base loss": ("2 S^pos", "1 none"),
        "the mask softmax helps the base loss": ("3 M", "1 none"),
        "the regularizer helps the base loss": ("4 L^p", "1 none"),
        "all three are better than without the positive mask": (full, "5 M, L^p"),
        "all three are better than without the mask softmax": (full, "6 S^pos, L^p"),
        "all three are better than without the regularizer": (full, "7 S^pos, M"),
    }
    return {claim: results.verdicts(*pair) for claim, pair in pairs.items()}
