"""How much the weight of the regularizer on proxies, lambda, matters."""

from proxygml.paper.drawing import draw_series, scores_table
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import METRICS, Claims, Results

ROWS = {weight: f"lambda {weight:g}" for weight in (0.0, 0.1, 0.3, 0.5, 0.7, 1.0)}


def claims(results: Results, dataset: str) -> Claims:
    alike, with_and_without = {}, {}
    for column, metric in METRICS.items():
        worst, *_, best = sorted(results.rows, key=lambda row: results.range(row, metric).mean)
        alike[column] = _alike(results, best, worst, metric)
        with_and_without[column] = _alike(results, ROWS[0.3], ROWS[0.0], metric)
    return {
        "lambda is insensitive": alike,
        "with the positive mask, having L^p (lambda 0.3) or not matters little": with_and_without,
    }


def _alike(results: Results, row: str, other: str, metric: str) -> str:
    difference = results.difference(row, other, metric)
    differ = abs(difference.mean) > difference.half_width
    what = "**does not hold**" if differ else "no significant difference"
    return f"{what} ({row} is {difference} above {other})"


EXPERIMENT = Experiment(
    rows=lambda base: {name: base.changed({"proxy_weight": weight}) for weight, name in ROWS.items()},
    table=lambda results, dataset: scores_table(results, "weight of L^p"),
    draw=lambda results, figure: draw_series(figure.subplots(), results, {"ProxyGML": ROWS}, "lambda"),
    claims=claims,
)
