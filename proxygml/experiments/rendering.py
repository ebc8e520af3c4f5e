"""What a reader sees of results/: tables and figures beside them, and docs/results.md."""

from pathlib import Path
from types import ModuleType

import matplotlib
from matplotlib.figure import Figure

from proxygml.experiments import EXPERIMENTS, find
from proxygml.experiments.drawing import doubt_of
from proxygml.experiments.found import Found, answers, load_runs, results_file
from proxygml.experiments.running import arms_as_in_the_paper, arms_to_tune
from proxygml.experiments.settings import SETTINGS, base_recipe
from proxygml.experiments.tables import Table
from proxygml.experiments.tuning import RATES, best, trials_of
from proxygml.files import written_whole

PROTOCOLS = {"paper": "", "fair": ", fair protocol"}
IN_SHORT = ("experiment", "on", "hold", "do not", "not told apart")
HEAD = """# Results

Written by `proxygml paper --report` from `results/`; do not edit. Every score is a mean over seeds with its
95 % interval (Student's t); differences are paired by seed, and "not told apart" where their interval holds 0. Unless a
heading says "fair protocol", test classes choose the best epoch, as in the paper, and no method is tuned; the fair
protocol is explained in [paper.md](paper.md). Where a network "as it comes" scores as high as one that was trained,
training did not help in that setting. A commit that ends in -dirty had changes that were not committed yet.

"""


def load_found(experiment: str, dataset: str, protocol: str, results: Path, *, quick: bool = False) -> Found:
    """What results/ holds of an experiment; a FileNotFoundError says how to make it.

    Runs of other settings than today's are left out; of the fair protocol they cannot be told.
    """
    path = protocol_file(results, experiment, dataset, protocol)
    arms = arms_as_in_the_paper(experiment, base_recipe(dataset, "", quick))
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
    table, remarks = module.table(found, dataset), _remarks(module, found)
    path = protocol_file(results, experiment, dataset, protocol)
    markdown = table.to_markdown() + _footnotes(remarks)
    for ending, text in ((".md", markdown), (".csv", table.to_csv()), (".tex", table.to_latex())):
        with written_whole(path.with_suffix(ending)) as draft:
            draft.write_text(text)
    with matplotlib.rc_context({"svg.hashsalt": experiment}):  # the same picture is the same file
        rows = max(4.0, 0.28 * len(found.arms))
        figure = Figure(figsize=(9, rows), layout="constrained")
        module.draw(found, figure)
        figure.suptitle(f"{experiment}, {path.stem}")
        for ending, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            with written_whole(path.with_suffix(ending)) as draft:
                figure.savefig(draft, format=ending[1:], dpi=110, metadata=metadata)
    return table, remarks


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
    with written_whole(page) as draft:
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
            text += f"Not run here so far: `{_command(experiment, 'glyphs', 'paper')}`.\n\n"
        for dataset, protocol in sections:
            text += _section(experiment, dataset, protocol, results, quick)
    return text.rstrip("\n") + "\n"


def _in_short(results: Path, quick: bool) -> str:
    """How many of the paper's claims hold, of each experiment."""
    rows = []
    for experiment in EXPERIMENTS:
        for dataset, protocol in made(experiment, results):
            found = load_found(experiment, dataset, protocol, results, quick=quick)
            if verdicts := _claims(experiment, dataset, found, quick).values():
                against = sum("does not hold" in verdict for verdict in verdicts)
                holds = sum(verdict.startswith(("holds", "it had the highest mean")) for verdict in verdicts)
                counts = (holds, against, len(verdicts) - holds - against)
                rows.append((experiment, dataset + PROTOCOLS[protocol], *map(str, counts)))
    if not rows:
        return ""
    return f"## in short\nClaims of the paper on this data.\n\n{Table(IN_SHORT, tuple(rows)).to_markdown()}\n"


def _claims(experiment: str, dataset: str, found: Found, quick: bool) -> dict[str, str]:
    """What the paper says and whether that holds; nothing before there are the rows for it."""
    module = find(experiment)
    missing = arms_as_in_the_paper(experiment, base_recipe(dataset, "", quick)).keys() - found.arms.keys()
    return {} if missing and not hasattr(module, "PAIRS") else module.claims(found, dataset)


def _section(experiment: str, dataset: str, protocol: str, results: Path, quick: bool) -> str:
    module, found = find(experiment), load_found(experiment, dataset, protocol, results, quick=quick)
    runs = [run for same in found.arms.values() for run in same]
    seeds = sorted({run["seed"] for run in runs})
    made_by = {key: sorted({str(run["made_by"][key]) for run in runs}) for key in ("commit", "machine")}
    hours = sum(run.get("seconds", 0.0) for run in runs) / 3600
    missing = len(arms_as_in_the_paper(experiment, base_recipe(dataset, "", quick))) - len(found.arms)
    claims = f"Not yet compared: {missing} rows are still to be run.\n\n" if missing else ""
    if judged := _claims(experiment, dataset, found, quick):
        listed = "".join(f"- {claim}: {verdict}\n" for claim, verdict in judged.items())
        claims += f"What the paper says of it, here:\n\n{listed}\n"
    picture = protocol_file(Path("results"), experiment, dataset, protocol).with_suffix(".png")
    return (
        f"### {experiment} on {dataset}{PROTOCOLS[protocol]}\n"
        + f"{SETTINGS[dataset].about}.\n\n"
        + module.table(found, dataset).to_markdown()
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
