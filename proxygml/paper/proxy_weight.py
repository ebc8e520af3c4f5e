"""How much the weight of the regularizer on proxies, lambda, matters."""

from matplotlib.figure import Figure

from proxygml.paper.drawing import draw_series, scores_table
from proxygml.paper.found import Claims, Found
from proxygml.paper.tables import Table
from proxygml.training.recipe import Recipe

IN_THE_PAPER = "supplement, Figure 2"
ARMS = {weight: f"lambda {weight:g}" for weight in (0.0, 0.1, 0.3, 0.5, 0.7, 1.0)}


def arms(base: Recipe) -> dict[str, Recipe]:
    return {name: base.changed({"proxy_weight": weight}) for weight, name in ARMS.items()}


def table(found: Found, dataset: str) -> Table:
    return scores_table(found, "weight of L^p")


def draw(found: Found, figure: Figure) -> None:
    draw_series(figure.subplots(), found, [("ProxyGML", ARMS)], "lambda")


def claims(found: Found, dataset: str) -> Claims:
    metrics = {"R@1": "recall@1", "NMI": "nmi"}
    return {
        "lambda is insensitive": {column: _insensitive(found, metric) for column, metric in metrics.items()},
        "with the positive mask, having L^p (lambda 0.3) or not matters little": {
            column: _alike(found, ARMS[0.3], ARMS[0.0], metric) for column, metric in metrics.items()
        },
    }


def _insensitive(found: Found, metric: str) -> str:
    ordered = sorted(found.arms, key=lambda arm: found.range(arm, metric).mean)
    return _alike(found, ordered[-1], ordered[0], metric)


def _alike(found: Found, arm: str, other: str, metric: str) -> str:
    difference = found.difference(arm, other, metric)
    differ = abs(difference.mean) > difference.half_width
    what = "**does not hold**" if differ else "no significant difference"
    return f"{what} ({arm} is {difference} above {other})"
