"""How many proxies a class needs, with a few, half or all of them linked."""

from matplotlib.figure import Figure

from proxygml.paper.drawing import draw_series, scores_table
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import METRICS, Claims, Range, Results, judge, range_of
from proxygml.training.recipe import Recipe

NUMBERS = (1, 4, 8, 12, 16, 20)
RATIOS = (0.05, 0.5, 1.0)


def named(number: int, ratio: float) -> str:
    """The row with `number` proxies per class and this ratio of linked proxies."""
    return f"N {number}, r {ratio:g}"


def combinations(base: Recipe, numbers: tuple[int, ...], ratios: tuple[float, ...]) -> dict[str, Recipe]:
    """A row for every number of proxies and every ratio."""
    return {
        named(number, ratio): base.changed({"proxies_per_class": number, "ratio": ratio})
        for ratio in ratios
        for number in numbers
    }


def draw(results: Results, figure: Figure) -> None:
    series = {f"r = {ratio:g}": {number: named(number, ratio) for number in NUMBERS} for ratio in RATIOS}
    draw_series(figure.subplots(), results, series, "proxies of a class, N")


def claims(results: Results, dataset: str) -> Claims:
    compared = {}
    for ratio in RATIOS:
        twelve = named(12, ratio)
        compared[f"at r = {ratio:g}, N = 12 is better than one proxy"] = results.verdicts(twelve, named(1, ratio))
        compared[f"at r = {ratio:g}, N = 12 is better than N = 20"] = results.verdicts(twelve, named(20, ratio))
        best = best_of(results, twelve, [named(number, ratio) for number in NUMBERS])
        compared[f"at r = {ratio:g}, N = 12 is best"] = best
    for ratio in RATIOS[1:]:
        claim = f"at N = 12, r = 0.05 is better than r = {ratio:g}"
        compared[claim] = results.verdicts(named(12, 0.05), named(12, ratio))
        stability = {column: judge(_steadier(results, ratio, metric)) for column, metric in METRICS.items()}
        compared[f"r = 0.05 is more stable over N than r = {ratio:g}"] = stability
    return compared


def _steadier(results: Results, ratio: float, metric: str) -> Range:
    """How much less scores vary with the number of proxies at r = 0.05 than at another ratio."""
    ours, theirs = (results.spread([named(number, each) for number in NUMBERS], metric) for each in (0.05, ratio))
    return range_of([theirs[seed] - ours[seed] for seed in ours if seed in theirs])


def best_of(results: Results, row: str, others: list[str]) -> dict[str, str]:
    """Whether a row has the highest mean of these rows, by both measures."""
    verdicts = {}
    for column, metric in METRICS.items():
        best = max(others, key=lambda other: results.range(other, metric).mean)
        verdicts[column] = "holds (highest mean)" if best == row else f"{best} is: {results.verdict(row, best, metric)}"
    return verdicts


EXPERIMENT = Experiment(
    rows=lambda base: combinations(base, NUMBERS, RATIOS),
    table=lambda results, dataset: scores_table(results, "proxies of a class, ratio linked"),
    draw=draw,
    claims=claims,
)
