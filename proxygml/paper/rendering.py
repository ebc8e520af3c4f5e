"""Tables and figures of an experiment, written beside its runs in results/."""

from pathlib import Path
from types import ModuleType

import matplotlib
from matplotlib.figure import Figure

from proxygml.files import atomic_write
from proxygml.paper import find, frozen
from proxygml.paper.drawing import caveat
from proxygml.paper.results import Claims, Results, load_runs, matches, results_file
from proxygml.paper.running import paper_rows, rows_of, rows_to_tune
from proxygml.paper.settings import SETTINGS, base_recipe
from proxygml.paper.tables import Table
from proxygml.paper.tuning import RATES, best, trials_of

PROTOCOLS = {"paper": "", "fair": ", fair protocol"}
CELLS = {"R@1": "recall@1", "R@2": "recall@2", "R@4": "recall@4", "R@10": "recall@10", "R@100": "recall@100"}
CELLS["NMI"] = "nmi"


def load_results(experiment: str, dataset: str, protocol: str, folder: Path, *, quick: bool = False) -> Results:
    """The results of an experiment in results/; without them, an error with the command to run.

    Runs of other settings than today's are left out; the fair protocol cannot check this.
    """
    path = protocol_file(folder, experiment, dataset, protocol)
    rows = rows_of(experiment, base_recipe(dataset, "", quick), protocol)
    runs = [run for run in load_runs(path) if run.get("row") in rows]
    if protocol == "paper":
        runs = [run for run in runs if matches(run, rows[run["row"]].changed({"seed": run["seed"]}))]
    if not runs:
        make = command(experiment, dataset, protocol) + (" --quick" if quick else "")
        raise FileNotFoundError(f"no runs of today's settings in {path}: make them with {make}")
    return Results.of(runs, rows)


def protocol_file(folder: Path, experiment: str, dataset: str, protocol: str) -> Path:
    """results/NAME/DATASET.json, or DATASET-fair.json."""
    return results_file(folder, experiment, dataset + ("-fair" if protocol == "fair" else ""))


def render(
    experiment: str, dataset: str, protocol: str, folder: Path, *, quick: bool = False
) -> tuple[Table, list[str]]:
    """Write the table (.md, .csv, .tex) and the figure (.png, .svg) of the finished runs; the table and its remarks."""
    module, results = find(experiment), load_results(experiment, dataset, protocol, folder, quick=quick)
    table, remarks = (
        full_table(experiment, results, dataset, folder),
        [*caveats(results), *mixed_times(module, results)],
    )
    path = protocol_file(folder, experiment, dataset, protocol)
    markdown = table.to_markdown() + "".join("\n" + remark.replace("*", r"\*") + "\n" for remark in remarks)
    if protocol == "fair":
        markdown += _chosen(experiment, dataset, results, folder, quick)
    if judged := claims(experiment, dataset, results, missing_rows(experiment, dataset, protocol, results, quick)):
        markdown += "\n" + claims_table(judged).to_markdown()
    for ending, text in ((".md", markdown), (".csv", table.to_csv()), (".tex", table.to_latex())):
        with atomic_write(path.with_suffix(ending)) as draft:
            draft.write_text(text)
    with matplotlib.rc_context({"svg.hashsalt": experiment}):  # equal figures are equal files
        height = getattr(module, "HEIGHT", max(4.0, 0.28 * len(results.rows)))
        figure = Figure(figsize=(9, height), layout="constrained")
        module.draw(results, figure)
        figure.suptitle(f"{experiment}, {path.stem}")
        for ending, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            with atomic_write(path.with_suffix(ending)) as draft:
                figure.savefig(draft, format=ending[1:], dpi=110, metadata=metadata)
    return table, remarks


def full_table(experiment: str, results: Results, dataset: str, folder: Path) -> Table:
    """The table of an experiment, after rows for the network without training and with a head on its features."""
    table = find(experiment).table(results, dataset)
    if experiment == "frozen" or not any(column in CELLS for column in table.columns):
        return table
    runs = load_runs(results_file(folder, "frozen", dataset))
    references = frozen.references(runs)
    shown = [frozen.FROZEN] if SETTINGS[dataset].recipe.feature_crops else [frozen.FROZEN, frozen.HEAD]
    rows = [
        (
            name,
            *(str(references.range(name, CELLS[column])) if column in CELLS else "-" for column in table.columns[1:]),
        )
        for name in shown
        if name in references.rows
    ]
    return Table(table.columns, (*rows, *table.rows))


def caveats(results: Results) -> list[str]:
    """A line for each loss in a table that has a caveat."""
    return [f"* {name}: {caveat(name)}" for name in results.rows if caveat(name)]


def mixed_times(module: ModuleType, results: Results) -> list[str]:
    """A line if the times in a table do not compare because its runs were made in different ways."""
    if not hasattr(module, "SECONDS"):
        return []
    made_by = [run["made_by"] for runs in results.rows.values() for run in runs]
    ways = {key: sorted({str(one.get(key, "unknown")) for one in made_by}) for key in ("machine", "torch", "jobs")}
    mixed = [f"{key} {' and '.join(names)}" for key, names in ways.items() if len(names) > 1]
    return [f"Seconds do not compare: these runs were made in different ways ({'; '.join(mixed)})."] if mixed else []


def missing_rows(experiment: str, dataset: str, protocol: str, results: Results, quick: bool) -> list[str]:
    """Rows of the paper that have no run yet."""
    rows = rows_of(experiment, base_recipe(dataset, "", quick), protocol)
    return [name for name in paper_rows(experiment, rows) if name not in results.rows]


def claims(experiment: str, dataset: str, results: Results, missing: list[str]) -> Claims:
    """The paper's claims with verdicts; none while rows that they need are missing."""
    module = find(experiment)
    return {} if missing and not hasattr(module, "PAIRS") else module.claims(results, dataset)


def claims_table(judged: Claims) -> Table:
    """A row for every claim, a column for every measure."""
    measures = dict.fromkeys(measure for verdicts in judged.values() for measure in verdicts)
    rows = [(claim, *(verdicts.get(measure, "-") for measure in measures)) for claim, verdicts in judged.items()]
    return Table(("the paper says", *measures), tuple(rows))


def made(experiment: str, folder: Path) -> list[tuple[str, str]]:
    """The datasets and protocols with results of an experiment."""
    return [
        (dataset, protocol)
        for dataset in SETTINGS
        for protocol in PROTOCOLS
        if protocol_file(folder, experiment, dataset, protocol).exists()
    ]


def _chosen(experiment: str, dataset: str, results: Results, folder: Path, quick: bool) -> str:
    """The settings that the fair protocol chose for each row."""
    rows = rows_to_tune(experiment, base_recipe(dataset, "", quick))
    tried = load_runs(results_file(folder, "tuning", dataset))
    trials = {name: own for name in results.rows if (own := trials_of(tried, name, rows[name]))}
    hours = sum(trial["seconds"] for own in trials.values() for trial in own) / 3600
    text = f"\nSettings chosen on held-out training classes, in {hours:.1f} hours "
    text += f"([trials](../tuning/{dataset}.json)):\n\n"
    for name, own in trials.items():
        settings = [f"{key} {'x ' if key in RATES else ''}{value:g}" for key, value in best(own).items()]
        text += f"- {name}, of {len(own)} trials: {', '.join(settings) or 'as it is'}\n"
    return text


def command(experiment: str, dataset: str, protocol: str) -> str:
    data = "" if SETTINGS[dataset].folder is None else " --data ROOT"
    return f"proxygml paper {experiment} --dataset {dataset}{data}" + (" --protocol fair" if protocol == "fair" else "")
