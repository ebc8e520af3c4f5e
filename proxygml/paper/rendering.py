"""What a reader sees of results/: tables and figures beside them, and docs/results.md."""

from pathlib import Path
from types import ModuleType

import matplotlib
from matplotlib.figure import Figure

from proxygml.files import atomic_write
from proxygml.paper import EXPERIMENTS, find, frozen
from proxygml.paper.drawing import doubt_of
from proxygml.paper.found import Claims, Found, answers, load_runs, results_file
from proxygml.paper.running import arms_of, arms_to_tune, paper_rows
from proxygml.paper.settings import SETTINGS, base_recipe
from proxygml.paper.tables import Table
from proxygml.paper.tuning import RATES, best, trials_of

PROTOCOLS = {"paper": "", "fair": ", fair protocol"}
MEASURES = ("R@1", "NMI")
IN_SHORT = ("experiment", "on", *(f"{measure}: {what}" for measure in MEASURES for what in ("hold", "do not", "open")))
CELLS = {"R@1": "recall@1", "R@2": "recall@2", "R@4": "recall@4", "R@10": "recall@10", "R@100": "recall@100"}
CELLS["NMI"] = "nmi"
HEAD = """# Results

Written by `proxygml paper --report` from `results/`; do not edit. Every score is a mean over seeds with its
95 % interval (Student's t); differences are paired by seed, and "no significant difference" means that their interval
holds 0. No method is tuned, unless a heading says "fair protocol" ([paper.md](paper.md)). On glyphs and omniglot the
best epoch on test classes counts, as in the paper; everywhere else the last epoch. A commit that ends in -dirty had
changes that were not committed yet.

"""


def load_found(experiment: str, dataset: str, protocol: str, results: Path, *, quick: bool = False) -> Found:
    """What results/ holds of an experiment; a FileNotFoundError says how to make it.

    Runs of other settings than today's are left out; of the fair protocol they cannot be told.
    """
    path = protocol_file(results, experiment, dataset, protocol)
    arms = arms_of(experiment, base_recipe(dataset, "", quick), protocol)
    runs = [run for run in load_runs(path) if run.get("arm") in arms]
    if protocol == "paper":
        runs = [run for run in runs if answers(run, arms[run["arm"]].changed({"seed": run["seed"]}))]
    if not runs:
        command = _command(experiment, dataset, protocol) + (" --quick" if quick else "")
        raise FileNotFoundError(f"no runs of today's settings in {path}: make them with {command}")
    return Found.of(runs, arms)


def protocol_file(results: Path, experiment: str, dataset: str, protocol: str) -> Path:
    """results/NAME/DATASET.json, or DATASET-fair.json."""
    return results_file(results, experiment, dataset + ("-fair" if protocol == "fair" else ""))


def render(
    experiment: str, dataset: str, protocol: str, results: Path, *, quick: bool = False
) -> tuple[Table, list[str]]:
    """Draw the table (.md, .csv, .tex) and the figure (.png, .svg) of what is there; the table and its remarks."""
    module, found = find(experiment), load_found(experiment, dataset, protocol, results, quick=quick)
    table, remarks = full_table(experiment, found, dataset, results), _remarks(module, found)
    path = protocol_file(results, experiment, dataset, protocol)
    markdown = table.to_markdown() + _footnotes(remarks)
    for ending, text in ((".md", markdown), (".csv", table.to_csv()), (".tex", table.to_latex())):
        with atomic_write(path.with_suffix(ending)) as draft:
            draft.write_text(text)
    with matplotlib.rc_context({"svg.hashsalt": experiment}):  # the same picture is the same file
        height = getattr(module, "HEIGHT", max(4.0, 0.28 * len(found.arms)))
        figure = Figure(figsize=(9, height), layout="constrained")
        module.draw(found, figure)
        figure.suptitle(f"{experiment}, {path.stem}")
        for ending, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            with atomic_write(path.with_suffix(ending)) as draft:
                figure.savefig(draft, format=ending[1:], dpi=110, metadata=metadata)
    return table, remarks


def full_table(experiment: str, found: Found, dataset: str, results: Path) -> Table:
    """The table of an experiment, below what the network scores without training and with a head on its features."""
    table = find(experiment).table(found, dataset)
    if experiment == "frozen" or not any(column in CELLS for column in table.columns):
        return table
    runs = load_runs(results_file(results, "frozen", dataset))
    references = frozen.references(runs)
    shown = [frozen.FROZEN] if SETTINGS[dataset].recipe.feature_crops else [frozen.FROZEN, frozen.HEAD]
    rows = [
        (
            name,
            *(str(references.range(name, CELLS[column])) if column in CELLS else "-" for column in table.columns[1:]),
        )
        for name in shown
        if name in references.arms
    ]
    return Table(table.columns, (*rows, *table.rows))


def _remarks(module: ModuleType, found: Found) -> list[str]:
    """What is remembered or reconstructed of the losses in a table, and where times in it do not compare."""
    remarks = [f"* {name}: {doubt_of(name)}" for name in found.arms if doubt_of(name)]
    if hasattr(module, "SECONDS"):
        made_by = [run["made_by"] for runs in found.arms.values() for run in runs]
        ways = {key: sorted({str(one.get(key, "unknown")) for one in made_by}) for key in ("machine", "torch", "jobs")}
        mixed = [f"{key} {' and '.join(names)}" for key, names in ways.items() if len(names) > 1]
        if mixed:
            remarks.append(f"Seconds do not compare, as these runs were made in different ways: {'; '.join(mixed)}.")
    return remarks


def _footnotes(remarks: list[str]) -> str:
    return "".join("\n" + remark.replace("*", r"\*") + "\n" for remark in remarks)


def made(experiment: str, results: Path) -> list[tuple[str, str]]:
    """The datasets and protocols of which results/ holds something."""
    return [
        (dataset, protocol)
        for dataset in SETTINGS
        for protocol in PROTOCOLS
        if protocol_file(results, experiment, dataset, protocol).exists()
    ]


def write_report() -> Path:
    """Draw all that results/ of this checkout holds, and write its docs/results.md."""
    results, page = Path("results"), Path("docs/results.md")
    if not results.is_dir() or not page.parent.is_dir():
        raise FileNotFoundError("no results/ and docs/ here: --report is for a checkout of proxygml")
    for experiment in EXPERIMENTS:
        for dataset, protocol in made(experiment, results):
            render(experiment, dataset, protocol, results)
    with atomic_write(page) as draft:
        draft.write_text(report(results))
    return page


def report(results: Path, *, quick: bool = False) -> str:
    """docs/results.md: all that results/ holds, in the order of the experiments."""
    text = HEAD + _in_short(results, quick)
    for experiment in EXPERIMENTS:
        module, sections = find(experiment), made(experiment, results)
        text += f"## {experiment}\n{str(module.__doc__).splitlines()[0]} In the paper: {module.IN_THE_PAPER}.\n\n"
        if hasattr(module, "REMARK"):
            text += f"{module.REMARK}\n\n"
        if not sections:
            dataset = "cars-head" if experiment == "frozen" else "glyphs"  # which starts from random weights
            text += f"Not run here so far: `{_command(experiment, dataset, 'paper')}`.\n\n"
        for dataset, protocol in sections:
            text += _section(experiment, dataset, protocol, results, quick)
    return text.rstrip("\n") + "\n"


def _in_short(results: Path, quick: bool) -> str:
    """How many of the paper's claims hold, of each experiment."""
    rows = []
    for experiment in EXPERIMENTS:
        for dataset, protocol in made(experiment, results):
            found = load_found(experiment, dataset, protocol, results, quick=quick)
            missing = _missing(experiment, dataset, protocol, found, quick)
            if verdicts := _claims(experiment, dataset, found, missing).values():
                counts: list[int] = []
                for measure in MEASURES:
                    said = [verdict[measure] for verdict in verdicts if measure in verdict]
                    against = sum("does not hold" in one for one in said)
                    holds = sum(one.startswith("holds") for one in said)
                    counts += holds, against, len(said) - holds - against
                if any(counts):
                    rows.append((experiment, dataset + PROTOCOLS[protocol], *map(str, counts)))
    if not rows:
        return ""
    table = Table(IN_SHORT, tuple(rows)).to_markdown()
    return f"## in short\nHow many of the paper's claims hold on this data, by Recall@1 and by NMI.\n\n{table}\n"


def _missing(experiment: str, dataset: str, protocol: str, found: Found, quick: bool) -> list[str]:
    """Rows of the paper that are still to be run."""
    arms = arms_of(experiment, base_recipe(dataset, "", quick), protocol)
    return [name for name in paper_rows(experiment, arms) if name not in found.arms]


def _claims(experiment: str, dataset: str, found: Found, missing: list[str]) -> Claims:
    """What the paper says and whether that holds; nothing before there are the rows for it."""
    module = find(experiment)
    return {} if missing and not hasattr(module, "PAIRS") else module.claims(found, dataset)


def _section(experiment: str, dataset: str, protocol: str, results: Path, quick: bool) -> str:
    module, found = find(experiment), load_found(experiment, dataset, protocol, results, quick=quick)
    runs = [run for same in found.arms.values() for run in same]
    seeds = sorted({run["seed"] for run in runs})
    made_by = {key: sorted({str(run["made_by"][key]) for run in runs}) for key in ("commit", "machine")}
    hours = sum(run.get("seconds", 0.0) for run in runs) / 3600
    missing = _missing(experiment, dataset, protocol, found, quick)
    claims = f"Not yet compared: {len(missing)} rows are still to be run.\n\n" if missing else ""
    if judged := _claims(experiment, dataset, found, missing):
        measures = list(dict.fromkeys(measure for verdicts in judged.values() for measure in verdicts))
        rows = tuple(
            (claim, *(verdicts.get(measure, "-") for measure in measures)) for claim, verdicts in judged.items()
        )
        claims += Table(("the paper says", *measures), rows).to_markdown() + "\n"
    picture = protocol_file(Path("results"), experiment, dataset, protocol).with_suffix(".png")
    return (
        f"### {experiment} on {dataset}{PROTOCOLS[protocol]}\n"
        + f"{SETTINGS[dataset].about}.\n\n"
        + full_table(experiment, found, dataset, results).to_markdown()
        + _footnotes(_remarks(module, found))
        + (_chosen(experiment, dataset, found, results, quick) if protocol == "fair" else "")
        + f"\n![{experiment} on {dataset}](../{picture})\n\n"
        + claims
        + f"`{_command(experiment, dataset, protocol)}`; {len(runs)} runs, seeds {', '.join(map(str, seeds))}, "
        + (f"{hours:.1f} hours of training, " if hours else "")
        + f"commit {', '.join(made_by['commit'])}, {', '.join(made_by['machine'])}.\n\n"
    )


def _chosen(experiment: str, dataset: str, found: Found, results: Path, quick: bool) -> str:
    """What the fair protocol's trials chose for each row."""
    arms = arms_to_tune(experiment, base_recipe(dataset, "", quick))
    tried = load_runs(results_file(results, "tuning", dataset))
    trials = {name: own for name in found.arms if (own := trials_of(tried, name, arms[name]))}
    hours = sum(trial["seconds"] for own in trials.values() for trial in own) / 3600
    text = f"\nSettings chosen on held-out training classes, in {hours:.1f} hours "
    text += f"([trials](../results/tuning/{dataset}.json)):\n\n"
    for name, own in trials.items():
        settings = [f"{key} {'x ' if key in RATES else ''}{value:g}" for key, value in best(own).items()]
        text += f"- {name}, of {len(own)} trials: {', '.join(settings) or 'as it is'}\n"
    return text


def _command(experiment: str, dataset: str, protocol: str) -> str:
    data = "" if SETTINGS[dataset].folder is None else " --data ROOT"
    return f"proxygml paper {experiment} --dataset {dataset}{data}" + (" --protocol fair" if protocol == "fair" else "")
