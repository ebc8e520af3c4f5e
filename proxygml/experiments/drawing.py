"""What the figures of several experiments are made of."""

import math
from collections.abc import Iterable, Mapping, Sequence

from matplotlib.axes import Axes

from proxygml import losses
from proxygml.experiments.found import Found, Range


def draw_bars(axis: Axes, ranges: Mapping[str, Range], label: str) -> None:
    """A horizontal bar for each name, from the top, with its interval."""
    names = list(ranges)
    widths = [ranges[name].mean for name in names]
    axis.barh(names, widths, xerr=[_half_width(ranges[name]) for name in names], color="#4575b4", ecolor="#4d4d4d")
    axis.yaxis.set_inverted(True)
    axis.set(xlabel=label, xlim=(0, None))


def draw_series(axis: Axes, found: Found, series: Iterable[tuple[str, Mapping[float, str]]], **labels: str) -> None:
    """A line for each series of arms by the number that they differ in; Recall@1 with its interval."""
    for name, arms in series:
        there = {number: arm for number, arm in arms.items() if arm in found.arms}
        ranges = [found.range(arm, "recall@1") for arm in there.values()]
        axis.errorbar(
            list(there),
            [r.mean for r in ranges],
            yerr=list(map(_half_width, ranges)),
            marker="o",
            capsize=3,
            label=name,
        )
    axis.set(ylabel="Recall@1, %", **labels)
    axis.legend()


def number_rows(found: Found, arms: Sequence[str], metrics: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Cells of a table: the arms that were run, with mean and interval of each metric."""
    return tuple((arm, *(str(found.range(arm, metric)) for metric in metrics)) for arm in arms if arm in found.arms)


def starred(name: str) -> str:
    """The name of an arm, with a star where it is a loss of which something is remembered or reconstructed."""
    return name + (" *" if doubt_of(name) else "")


def doubt_of(name: str) -> str:
    """What is remembered or reconstructed of a loss, if the arm is named after one."""
    return losses.METHODS[name].doubt if name in losses.METHODS else ""


def _half_width(over_seeds: Range) -> float:
    return 0.0 if math.isnan(over_seeds.half_width) else over_seeds.half_width
