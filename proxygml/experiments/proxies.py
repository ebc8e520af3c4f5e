"""How many proxies a class needs, with few, half and all of them linked."""

from matplotlib.figure import Figure

from proxygml.experiments.drawing import draw_series, scores_table
from proxygml.experiments.found import Found
from proxygml.experiments.tables import Table
from proxygml.recipes import Recipe

IN_THE_PAPER = "Figure 4"
NUMBERS = (1, 4, 8, 12, 16, 20)
RATIOS = (0.05, 0.5, 1.0)


def named(number: int, ratio: float) -> str:
    """The arm with `number` proxies for each class and this ratio of them linked."""
    return f"N {number}, r {ratio:g}"


def combinations(base: Recipe, numbers: tuple[int, ...], ratios: tuple[float, ...]) -> dict[str, Recipe]:
    """An arm for every number of proxies and every ratio."""
    return {
        named(number, ratio): base.changed({"proxies_per_class": number, "ratio": ratio})
        for ratio in ratios
        for number in numbers
    }


def arms(base: Recipe) -> dict[str, Recipe]:
    return combinations(base, NUMBERS, RATIOS)


def table(found: Found, dataset: str) -> Table:
    return scores_table(found, "proxies of a class, ratio linked")


def draw(found: Found, figure: Figure) -> None:
    series = [(f"r = {ratio:g}", {number: named(number, ratio) for number in NUMBERS}) for ratio in RATIOS]
    draw_series(figure.subplots(), found, series, "proxies of a class, N")


def claims(found: Found, dataset: str) -> dict[str, str]:
    compared = {}
    for ratio in RATIOS:
        twelve = named(12, ratio)
        best = max(NUMBERS, key=lambda number: found.range(named(number, ratio), "recall@1").mean)
        compared[f"at r = {ratio:g}, N = 12 is better than one proxy"] = found.verdict(twelve, named(1, ratio))
        compared[f"at r = {ratio:g}, N = 12 is better than N = 20"] = found.verdict(twelve, named(20, ratio))
        compared[f"at r = {ratio:g}, N = 12 is best"] = (
            "it had the highest mean" if best == 12 else f"N = {best} was: {found.verdict(twelve, named(best, ratio))}"
        )
    for ratio in RATIOS[1:]:
        compared[f"at N = 12, r = 0.05 is better than r = {ratio:g}"] = found.verdict(named(12, 0.05), named(12, ratio))
    return compared
