"""Tables, claims and figures of the finished runs of an experiment, written beside them in results/."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from proxygml.files import atomic_write
from proxygml.paper import find, frozen
from proxygml.paper.drawing import caveat
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import METRICS, Claims, Results, load_runs, matches, results_file
from proxygml.paper.settings import SETTINGS, base_recipe
from proxygml.paper.tables import Table
from proxygml.paper.tuning import RATES, best, trials_of
from proxygml.training.recipe import Recipe

PROTOCOLS = {"paper": "", "fair": ", fair protocol"}
CELLS = METRICS | {f"R@{n}": f"recall@{n}" for n in (2, 4, 10, 100)}


@dataclass(frozen=True)
class Section:
    """The finished runs of an experiment on a dataset by a protocol, in a folder of results."""

    name: str  # of the experiment
    dataset: str
    protocol: str
    folder: Path
    quick: bool = False

    @property
    def path(self) -> Path:
        """results/NAME/DATASET.json, or DATASET-fair.json."""
        return results_file(self.folder, self.name, self.dataset + ("-fair" if self.protocol == "fair" else ""))

    @property
    def command(self) -> str:
        """The command that makes the runs."""
        data = "" if SETTINGS[self.dataset].folder is None else " --data ROOT"
        protocol = " --protocol fair" if self.protocol == "fair" else ""
        return f"proxygml paper {self.name} --dataset {self.dataset}{data}{protocol}" + " --quick" * self.quick

    @property
    def experiment(self) -> Experiment:
        return find(self.name)

    @cached_property
    def recipes(self) -> dict[str, Recipe]:
        """The recipe of each row, as it is today."""
        return self.experiment.recipes(base_recipe(self.dataset, "", self.quick), self.protocol)

    @cached_property
    def results(self) -> Results:
        """The finished runs; without any, an error with the command to run.

        Runs of other settings than today's are left out; the fair protocol cannot check this.
        """
        recipes = self.recipes
        runs = [run for run in load_runs(self.path) if run.get("row") in recipes]
        if self.protocol == "paper":
            runs = [run for run in runs if matches(run, recipes[run["row"]].changed({"seed": run["seed"]}))]
        if not runs:
            raise FileNotFoundError(f"no runs of today's settings in {self.path}: make them with {self.command}")
        return Results.of(runs, recipes)

    @property
    def missing(self) -> list[str]:
        """Rows of the paper that have no run yet."""
        return [name for name in self.experiment.of_paper(self.recipes) if name not in self.results.rows]

    @property
    def claims(self) -> Claims:
        """The paper's claims with verdicts; none while rows that they need are missing."""
        complete = self.experiment.partial_claims or not self.missing
        return self.experiment.claims(self.results, self.dataset) if complete else {}

    @property
    def claims_table(self) -> Table:
        """A row for every claim, a column for every measure."""
        measures = dict.fromkeys(measure for verdicts in self.claims.values() for measure in verdicts)
        rows = [(claim, *(verdicts.get(name, "-") for name in measures)) for claim, verdicts in self.claims.items()]
        return Table(("the paper says", *measures), tuple(rows))

    @property
    def table(self) -> Table:
        """The experiment's table, after rows for the network without training and with a head on its features."""
        table = self.experiment.table(self.results, self.dataset)
        if self.name == "frozen" or not any(column in CELLS for column in table.columns):
            return table
        references = frozen.references(load_runs(results_file(self.folder, "frozen", self.dataset)))
        shown = [frozen.FROZEN] if SETTINGS[self.dataset].recipe.feature_crops else [frozen.FROZEN, frozen.HEAD]
        rows = [
            (
                name,
                *(str(references.range(name, CELLS[one])) if one in CELLS else "-" for one in table.columns[1:]),
            )
            for name in shown
            if name in references.rows
        ]
        return Table(table.columns, (*rows, *table.rows))

    @property
    def caveats(self) -> list[str]:
        """A line for each loss in the table that has a caveat."""
        return [f"* {name}: {caveat(name)}" for name in self.results.rows if caveat(name)]

    @property
    def mixed_times(self) -> list[str]:
        """A line if the times in the table do not compare because its runs were made in different ways."""
        made_by = [run["made_by"] for run in self.results.runs] if self.experiment.every_epoch else []
        ways = {key: sorted({str(one.get(key, "unknown")) for one in made_by}) for key in ("machine", "torch", "jobs")}
        mixed = "; ".join(f"{key} {' and '.join(names)}" for key, names in ways.items() if len(names) > 1)
        return [f"Seconds do not compare: these runs were made in different ways ({mixed})."] if mixed else []

    @property
    def chosen_settings(self) -> str:
        """The settings that the fair protocol chose for each row."""
        tried = load_runs(results_file(self.folder, "tuning", self.dataset))
        trials = {name: own for name in self.results.rows if (own := trials_of(tried, name, self.recipes[name]))}
        hours = sum(trial["seconds"] for own in trials.values() for trial in own) / 3600
        text = f"\nSettings chosen on held-out training classes, in {hours:.1f} hours "
        text += f"([trials](../tuning/{self.dataset}.json)):\n\n"
        for name, own in trials.items():
            settings = [f"{key} {'x ' if key in RATES else ''}{value:g}" for key, value in best(own).items()]
            text += f"- {name}, of {len(own)} trials: {', '.join(settings) or 'as it is'}\n"
        return text

    def render(self) -> tuple[Table, list[str]]:
        """Write the table (.md, .csv, .tex) and the figure (.png, .svg); the table and its remarks."""
        table, remarks = self.table, [*self.caveats, *self.mixed_times]
        markdown = table.to_markdown() + "".join("\n" + remark.replace("*", r"\*") + "\n" for remark in remarks)
        if self.protocol == "fair":
            markdown += self.chosen_settings
        if self.claims:
            markdown += "\n" + self.claims_table.to_markdown()
        for ending, text in ((".md", markdown), (".csv", table.to_csv()), (".tex", table.to_latex())):
            with atomic_write(self.path.with_suffix(ending)) as draft:
                draft.write_text(text)
        with matplotlib.rc_context({"svg.hashsalt": self.name}):  # equal figures are equal files
            height = self.experiment.height or max(4.0, 0.28 * len(self.results.rows))
            figure = Figure(figsize=(9, height), layout="constrained")
            self.experiment.draw(self.results, figure)
            figure.suptitle(f"{self.name}, {self.path.stem}")
            for ending, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
                with atomic_write(self.path.with_suffix(ending)) as draft:
                    figure.savefig(draft, format=ending[1:], dpi=110, metadata=metadata)
        return table, remarks


def sections_of(experiment: str, folder: Path, *, quick: bool = False) -> list[Section]:
    """A section for each dataset and protocol with results of an experiment."""
    every = (Section(experiment, dataset, name, folder, quick) for dataset in SETTINGS for name in PROTOCOLS)
    return [section for section in every if section.path.exists()]
