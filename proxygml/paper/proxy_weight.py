"""How much the weight of the regularizer on proxies, lambda, matters."""

from matplotlib.figure import Figure

from proxygml.paper.drawing import draw_series, scores_table
from proxygml.paper.results import Claims, Results
from proxygml.paper.tables import Table
from proxygml.training.recipe import Recipe

IN_THE_PAPER = "supplement, Figure 2"
ROWS = {weight: f"lambda {weight:g}" for weight in (0.0, 0.1, 0.3, 0.5, 0.7, 1.0)}


def rows(base: Recipe) -> dict[str, Recipe]:
    return {name: base.changed({"proxy_weight": weight}) for weight, name in ROWS.items()}


def table(results: Results, dataset: str) -> Table:
    return scores_table(results, "weight of L^p")


def draw(results: Results, figure: Figure) -> None:
    draw_series(figure.subplots(), results, [("ProxyGML", ROWS)], "lambda")


def claims(results: Results, dataset: str) -> Claims:
    metrics = {"R@1": "recall@1", "NMI": "nmi"}
    return {
        "lambda is insensitive": {column: _insensitive(results, metric) for column, metric in metrics.items()},
        "with the positive mask, having L^p (lambda 0.3) or not matters little": {
            column: _alike(results, ROWS[0.3], ROWS[0.0], metric) for column, metric in metrics.items()
        },
    }


def _insensitive(results: Results, metric: str) -> str:
    ordered = sorted(results.rows, key=lambda row: results.range(row, metric).mean)
    return _alike(results, ordered[-1], ordered[0], metric)


def _alike(results: Results, row: str, other: str, metric: str) -> str:
    difference = results.difference(row, other, metric)
    differ = abs(difference.mean) > difference.half_width
    what = "**does not hold**" if differ else "no significant difference"
    return f"{what} ({row} is {difference} above {other})"
