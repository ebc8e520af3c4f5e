"""How much the weight of the regulariser on proxies, lambda, matters."""

from matplotlib.figure import Figure

from proxygml.experiments.drawing import draw_series, scores_table
from proxygml.experiments.found import Found
from proxygml.experiments.tables import Table
from proxygml.recipes import Recipe

IN_THE_PAPER = "supplement, Figure 2"
ARMS = {weight: f"lambda {weight:g}" for weight in (0.0, 0.1, 0.3, 0.5, 0.7, 1.0)}


def arms(base: Recipe) -> dict[str, Recipe]:
    return {name: base.changed({"proxy_weight": weight}) for weight, name in ARMS.items()}


def table(found: Found, dataset: str) -> Table:
    return scores_table(found, "weight of L^p")


def draw(found: Found, figure: Figure) -> None:
    draw_series(figure.subplots(), found, [("ProxyGML", ARMS)], "lambda")


def claims(found: Found, dataset: str) -> dict[str, str]:
    means = [found.range(name, "recall@1").mean for name in ARMS.values() if name in found.arms]
    return {
        "lambda is insensitive": f"means differ by {max(means) - min(means):.1f} points",
        "with the positive mask, having L^p (lambda 0.3) or not matters little": (
            f"difference {found.difference(ARMS[0.3], ARMS[0.0], 'recall@1')}"
        ),
    }
