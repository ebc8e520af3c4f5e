"""Table 1 of the paper, and how much its three numbers matter: proxies per class, ratio of links, lambda."""

from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure

from proxygml.paper.drawing import draw_ranges, draw_series, scores_table
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import METRICS, Claims, Range, Results, judge, range_of
from proxygml.paper.tables import Table
from proxygml.training.recipe import Recipe

MODULE_ROWS = {  # S^pos, M, L^p; NMI and Recall@1 of the paper, on Cars196
    "1 none": (False, False, False, 52.1, 47.3),
    "2 S^pos": (True, False, False, 69.6, 83.3),
    "3 M": (False, True, False, 54.9, 66.1),
    "4 L^p": (False, False, True, 67.1, 81.7),
    "5 M, L^p": (False, True, True, 68.8, 82.6),
    "6 S^pos, L^p": (True, False, True, 71.6, 84.5),
    "7 S^pos, M": (True, True, False, 70.7, 84.0),
    "8 all three": (True, True, True, 72.4, 85.5),
}
MODULE_CLAIMS = {  # the better row, the other
    "the positive mask helps the base loss": ("2 S^pos", "1 none"),
    "the mask softmax helps the base loss": ("3 M", "1 none"),
    "the regularizer helps the base loss": ("4 L^p", "1 none"),
    "all three are better than without the positive mask": ("8 all three", "5 M, L^p"),
    "all three are better than without the mask softmax": ("8 all three", "6 S^pos, L^p"),
    "all three are better than without the regularizer": ("8 all three", "7 S^pos, M"),
}


def module_rows(base: Recipe) -> dict[str, Recipe]:
    """Lambda is 0 without L^p, and 0.3 with it where the preset has none (Stanford Online Products)."""
    weight = base.proxy_weight or 0.3
    return {
        name: base.changed({"positive_mask": mask, "mask_softmax": softmax, "proxy_weight": weight if proxies else 0.0})
        for name, (mask, softmax, proxies, _, _) in MODULE_ROWS.items()
    }


def module_table(results: Results, dataset: str) -> Table:
    columns = ("modules", "NMI", "R@1", "paper, Cars196: NMI", "paper, Cars196: R@1")
    rows = [(name, *results.cells(name, "nmi", "recall@1"), *map(str, MODULE_ROWS[name][3:])) for name in results.rows]
    return Table(columns, tuple(rows))


def draw_modules(results: Results, figure: Figure) -> None:
    for axis, metric, label in zip(figure.subplots(1, 2), ("nmi", "recall@1"), ("NMI, %", "Recall@1, %"), strict=True):
        draw_ranges(axis, {name: results.range(name, metric) for name in results.rows}, label)


MODULES = Experiment(
    seeds=5,
    rows=module_rows,
    table=module_table,
    draw=draw_modules,
    claims=lambda results, dataset: {claim: results.verdicts(*pair) for claim, pair in MODULE_CLAIMS.items()},
)


# Numbers of proxies and ratios of links

NUMBERS, FEW_RATIOS = (1, 4, 8, 12, 16, 20), (0.05, 0.5, 1.0)  # Figure 4
RATIOS = (0.01, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0)  # Figure 5, at N = 12
GRID_NUMBERS, GRID_RATIOS = (1, 4, 8, 12, 16), (0.01, 0.05, 0.1, 0.5, 1.0)  # of the supplement
NARROWING = "N 12, r from 1 to 0.05"  # ours, not the paper's


def row_name(number: int, ratio: float) -> str:
    """The row with `number` proxies per class and this ratio of linked proxies."""
    return f"N {number}, r {ratio:g}"


def combinations(base: Recipe, numbers: Iterable[int], ratios: Iterable[float]) -> dict[str, Recipe]:
    """A row for every number of proxies and every ratio."""
    return {
        row_name(number, ratio): base.changed({"proxies_per_class": number, "ratio": ratio})
        for ratio in ratios
        for number in numbers
    }


def best_of(results: Results, row: str, others: Iterable[str]) -> dict[str, str]:
    """Whether a row has the highest mean of these rows, by both measures."""
    verdicts = {}
    for column, metric in METRICS.items():
        best = max(others, key=lambda other: results.range(other, metric).mean)
        verdicts[column] = "holds (highest mean)" if best == row else f"{best} is: {results.verdict(row, best, metric)}"
    return verdicts


def draw_proxies(results: Results, figure: Figure) -> None:
    series = {f"r = {ratio:g}": {number: row_name(number, ratio) for number in NUMBERS} for ratio in FEW_RATIOS}
    draw_series(figure.subplots(), results, series, "proxies of a class, N")


def proxies_claims(results: Results, dataset: str) -> Claims:
    compared = {}
    for ratio in FEW_RATIOS:
        twelve = row_name(12, ratio)
        compared[f"at r = {ratio:g}, N = 12 is better than one proxy"] = results.verdicts(twelve, row_name(1, ratio))
        compared[f"at r = {ratio:g}, N = 12 is better than N = 20"] = results.verdicts(twelve, row_name(20, ratio))
        best = best_of(results, twelve, [row_name(number, ratio) for number in NUMBERS])
        compared[f"at r = {ratio:g}, N = 12 is best"] = best
    for ratio in FEW_RATIOS[1:]:
        claim = f"at N = 12, r = 0.05 is better than r = {ratio:g}"
        compared[claim] = results.verdicts(row_name(12, 0.05), row_name(12, ratio))
        stability = {column: judge(_steadier(results, ratio, metric)) for column, metric in METRICS.items()}
        compared[f"r = 0.05 is more stable over N than r = {ratio:g}"] = stability
    return compared


def _steadier(results: Results, ratio: float, metric: str) -> Range:
    """How much less scores vary with the number of proxies at r = 0.05 than at another ratio."""
    ours, theirs = (results.spread([row_name(number, each) for number in NUMBERS], metric) for each in (0.05, ratio))
    return range_of([theirs[seed] - ours[seed] for seed in ours if seed in theirs])


PROXIES = Experiment(
    rows=lambda base: combinations(base, NUMBERS, FEW_RATIOS),
    table=lambda results, dataset: scores_table(results, "proxies of a class, ratio linked"),
    draw=draw_proxies,
    claims=proxies_claims,
)


def ratio_rows(base: Recipe) -> dict[str, Recipe]:
    narrowing = base.changed({"proxies_per_class": 12, "ratio": 0.05, "start_ratio": 1.0})
    return combinations(base, (12,), RATIOS) | {NARROWING: narrowing}


def draw_ratio(results: Results, figure: Figure) -> None:
    axis = figure.subplots()
    axis.set_xscale("log")
    axis.minorticks_off()
    series = {"N = 12": {ratio: row_name(12, ratio) for ratio in RATIOS}}
    draw_series(axis, results, series, "ratio linked, r, at N = 12")
    if NARROWING in results.rows:
        mean = results.range(NARROWING, "recall@1").mean
        axis.axhline(mean, linestyle=":", color="#d73027", label="r from 1 to 0.05")
        axis.legend()


def ratio_claims(results: Results, dataset: str) -> Claims:
    ours = row_name(12, 0.05)
    return {
        f"r = 0.05 is better than r = {ratio:g}": results.verdicts(ours, row_name(12, ratio))
        for ratio in RATIOS
        if ratio != 0.05 and {ours, row_name(12, ratio)} <= results.rows.keys()
    }


RATIO = Experiment(
    rows=ratio_rows,
    table=lambda results, dataset: scores_table(results, "ratio linked"),
    draw=draw_ratio,
    claims=ratio_claims,
    partial_claims=True,
)


def grid_table(results: Results, dataset: str) -> Table:
    rows = [
        (f"r {ratio:g}", *(str(results.range(row_name(number, ratio), "recall@1")) for number in GRID_NUMBERS))
        for ratio in GRID_RATIOS
    ]
    return Table(("R@1", *(f"N {number}" for number in GRID_NUMBERS)), tuple(rows))


def draw_grid(results: Results, figure: Figure) -> None:
    ranges = [[results.range(row_name(number, ratio), "recall@1") for number in GRID_NUMBERS] for ratio in GRID_RATIOS]
    means = np.array([[one.mean for one in row] for row in ranges])
    axis = figure.subplots()
    axis.imshow(means, cmap="viridis", aspect="auto")
    axis.set(xlabel="proxies of a class, N", ylabel="ratio linked, r", title="Recall@1, %")
    axis.set_xticks(range(len(GRID_NUMBERS)), list(map(str, GRID_NUMBERS)))
    axis.set_yticks(range(len(GRID_RATIOS)), list(map(str, GRID_RATIOS)))
    for (row, column), value in np.ndenumerate(means):
        dark = value < (np.nanmin(means) + np.nanmax(means)) / 2
        axis.text(column, row, f"{value:.1f}", ha="center", va="center", color="white" if dark else "black")


def grid_claims(results: Results, dataset: str) -> Claims:
    full = row_name(12, 0.05)
    return {
        "N = 12 with r = 0.05 is best": best_of(results, full, results.rows),
        "r = 0.01 is worse than r = 0.05 at N = 12": results.verdicts(full, row_name(12, 0.01)),
        "N = 1 with all linked is worse than N = 12 with r = 0.05": results.verdicts(full, row_name(1, 1.0)),
    }


GRID = Experiment(
    remark="If r C N is below N, all links go to proxies of the sample's class, whatever r is: these cells are equal.",
    rows=lambda base: combinations(base, GRID_NUMBERS, GRID_RATIOS),
    table=grid_table,
    draw=draw_grid,
    claims=grid_claims,
)


# Lambda

LAMBDA_ROWS = {weight: f"lambda {weight:g}" for weight in (0.0, 0.1, 0.3, 0.5, 0.7, 1.0)}


def lambda_claims(results: Results, dataset: str) -> Claims:
    alike, with_and_without = {}, {}
    for column, metric in METRICS.items():
        worst, *_, best = sorted(results.rows, key=lambda row: results.range(row, metric).mean)
        alike[column] = _alike(results, best, worst, metric)
        with_and_without[column] = _alike(results, LAMBDA_ROWS[0.3], LAMBDA_ROWS[0.0], metric)
    return {
        "lambda is insensitive": alike,
        "with the positive mask, having L^p (lambda 0.3) or not matters little": with_and_without,
    }


def _alike(results: Results, row: str, other: str, metric: str) -> str:
    difference = results.difference(row, other, metric)
    differ = abs(difference.mean) > difference.half_width
    what = "**does not hold**" if differ else "no significant difference"
    return f"{what} ({row} is {difference} above {other})"


LAMBDA = Experiment(
    rows=lambda base: {name: base.changed({"proxy_weight": weight}) for weight, name in LAMBDA_ROWS.items()},
    table=lambda results, dataset: scores_table(results, "weight of L^p"),
    draw=lambda results, figure: draw_series(figure.subplots(), results, {"ProxyGML": LAMBDA_ROWS}, "lambda"),
    claims=lambda_claims,
)
