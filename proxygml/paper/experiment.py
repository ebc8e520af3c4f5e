"""What an experiment consists of: recipes, and what to make of their results."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from proxygml.paper.results import Claims, Results
from proxygml.paper.tables import Table
from proxygml.training.recipe import Recipe


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper."""

    rows: Callable[[Recipe], dict[str, Recipe]]  # the recipe of each row or point, from that of the setting
    table: Callable[[Results, str], Table]  # results, dataset
    draw: Callable[[Results, Figure], None]
    claims: Callable[[Results, str], Claims] = lambda results, dataset: {}  # of the paper, each with verdicts
    measure: Callable[[Recipe, Path], dict] | None = None  # measures something other than scores, one run at a time
    seeds: int = 3
    every_epoch: bool = False  # test classes are scored after every epoch, and times are compared
    partial_claims: bool = False  # a claim needs only its own rows, not all
    paper_rows: Collection[str] = ()  # rows of the queue; empty: all
    variants: Collection[str] = ()  # left out by the fair protocol, which searches the setting they differ in
    remark: str = ""
    height: float | None = None  # of the figure, in inches

    def recipes(self, base: Recipe, protocol: str = "paper") -> dict[str, Recipe]:
        """The recipe of each row by a protocol.

        Test classes are scored after the authors' epochs, else after every epoch; by the fair protocol only at the end.
        """
        all_epochs = tuple(range(1, base.epochs + 1))
        if protocol == "fair":
            rows = self.rows(base.changed({"held_out": 0.0, "baselines": False, "tested_epochs": ()}))
            return {name: recipe for name, recipe in rows.items() if name not in self.variants}
        if base.keep_epoch == "last":
            return self.rows(base.changed({"tested_epochs": all_epochs if self.every_epoch else ()}))
        authors = tuple(epoch for epoch in base.tested_epochs if epoch <= base.epochs)
        tested = all_epochs if self.every_epoch else authors or all_epochs
        return self.rows(base.changed({"held_out": 0.0, "baselines": False, "tested_epochs": tested, "test": False}))

    def of_paper(self, rows: Collection[str]) -> list[str]:
        """Those of these rows that the queue runs."""
        return [name for name in rows if not self.paper_rows or name in self.paper_rows]
