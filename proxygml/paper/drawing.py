"""Figures and tables that several experiments share."""

import math
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from proxygml import losses
from proxygml.paper.results import METRICS, Range, Results
from proxygml.paper.tables import Table


def draw_ranges(axis: Axes, ranges: Mapping[str, Range], label: str) -> None:
    """A point with an interval for each name, from the top; ProxyGML in another color."""
    for name, one in ranges.items():
        color = "#d73027" if name.lower().startswith("proxygml") else "#4575b4"
        axis.errorbar(one.mean, name, xerr=_half_width(one), fmt="o", color=color, markersize=5)
    axis.grid(alpha=0.3)
    axis.yaxis.set_inverted(True)
    axis.set(xlabel=label)


def draw_recall(results: Results, figure: Figure) -> None:
    """Recall@1 of every row."""
    draw_ranges(figure.subplots(), {name: results.range(name, "recall@1") for name in results.rows}, "Recall@1, %")


def draw_series(
    axis: Axes, results: Results, series: Mapping[str, Mapping[int, str] | Mapping[float, str]], xlabel: str
) -> None:
    """Recall@1 with intervals against the number that rows differ in; a line for each series."""
    for name, rows in series.items():
        ranges = {number: results.range(row, "recall@1") for number, row in rows.items() if row in results.rows}
        means, widths = [one.mean for one in ranges.values()], [_half_width(one) for one in ranges.values()]
        axis.errorbar(list(ranges), means, yerr=widths, marker="o", capsize=3, label=name)
    numbers = sorted({number for rows in series.values() for number in rows})
    axis.set_xticks(numbers, [f"{number:g}" for number in numbers])
    axis.grid(alpha=0.3)
    axis.set(xlabel=xlabel, ylabel="Recall@1, %")
    if len(series) > 1:
        axis.legend()


def scores_table(results: Results, what: str) -> Table:
    """Recall@1 and NMI of every row with intervals; `what` names the first column."""
    return Table((what, *METRICS), tuple((row, *results.cells(row, *METRICS.values())) for row in results.rows))


def starred(name: str) -> str:
    """The name of a row, with a star if its loss has a caveat."""
    return name + (" *" if caveat(name) else "")


def caveat(name: str) -> str:
    """The caveat of the loss that the row is named after, if any."""
    return losses.METHODS[name].caveat if name in losses.METHODS else ""


def _half_width(over_seeds: Range) -> float:
    return 0.0 if math.isnan(over_seeds.half_width) else over_seeds.half_width
