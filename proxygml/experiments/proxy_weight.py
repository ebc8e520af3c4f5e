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
    best = found.best("recall@1")
    worst = min(found.arms, key=lambda arm: found.range(arm, "recall@1").mean)
    return {
        "lambda is insensitive": _alike(found, best, worst),
        "with the positive mask, having L^p (lambda 0.3) or not matters little": _alike(found, ARMS[0.3], ARMS[0.0]),
    }


def _alike(found: Found, arm: str, other: str) -> str:
    difference = found.difference(arm, other, "recall@1")
    apart = abs(difference.mean) > difference.half_width
    return f"{'**does not hold**' if apart else 'not told apart'} ({arm} is {difference} above {other})"
