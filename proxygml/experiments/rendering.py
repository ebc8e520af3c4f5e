"""What a reader sees of results/: tables and figures beside them, and docs/results.md."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from proxygml.experiments import EXPERIMENTS, find
from proxygml.experiments.found import Found, load_runs, results_file
from proxygml.experiments.settings import SETTINGS
from proxygml.experiments.tables import Table
from proxygml.files import written_whole

HEAD = """# Results

Written by `proxygml paper --report` from [results/](../results); do not edit. Every score is a mean over seeds with its
95 % interval (Student's t); differences are paired by seed, and "not told apart" where their interval holds 0. Test
classes choose the best epoch, as in the paper, which flatters all methods; no method was tuned.

"""


def load_found(experiment: str, dataset: str, results: Path) -> Found:
    """What results/ holds of an experiment; a FileNotFoundError says how to make it."""
    runs = load_runs(results_file(results, experiment, dataset))
    if not runs:
        raise FileNotFoundError(
            f"no runs in {results_file(results, experiment, dataset)}: make them with {_command(experiment, dataset)}"
        )
    return Found.of(runs, find(experiment).arms(SETTINGS[dataset].recipe))


def render(experiment: str, dataset: str, results: Path) -> Table:
    """Draw the table (.md, .csv, .tex) and the figure (.png, .svg) of what results/ holds; the table."""
    module, found = find(experiment), load_found(experiment, dataset, results)
    table = module.table(found, dataset)
    path = results_file(results, experiment, dataset)
    for ending, text in ((".md", table.to_markdown()), (".csv", table.to_csv()), (".tex", table.to_latex())):
        with written_whole(path.with_suffix(ending)) as draft:
            draft.write_text(text)
    with matplotlib.rc_context({"svg.hashsalt": experiment}):  # the same picture is the same file
        rows = max(4.0, 0.28 * len(found.arms))
        figure = Figure(figsize=(9, rows), layout="constrained")
        module.draw(found, figure)
        figure.suptitle(f"{experiment}, {dataset}")
        for ending, metadata in ((".png", {"Software": None}), (".svg", {"Date": None})):
            with written_whole(path.with_suffix(ending)) as draft:
                figure.savefig(draft, format=ending[1:], dpi=110, metadata=metadata)
    return table


def report(results: Path) -> str:
    """docs/results.md: all that results/ holds, in the order of the experiments."""
    text = HEAD
    for experiment in EXPERIMENTS:
        module = find(experiment)
        datasets = [name for name in SETTINGS if results_file(results, experiment, name).exists()]
        text += f"## {experiment}\n{module.__doc__.splitlines()[0]} In the paper: {module.IN_THE_PAPER}.\n\n"
        if not datasets:
            text += f"Not run here so far: `{_command(experiment, 'glyphs')}`.\n\n"
        for dataset in datasets:
            text += _section(experiment, dataset, results)
    return text.rstrip("\n") + "\n"


def _section(experiment: str, dataset: str, results: Path) -> str:
    module, found = find(experiment), load_found(experiment, dataset, results)
    runs = [run for same in found.arms.values() for run in same]
    seeds = sorted({run["seed"] for run in runs})
    made_by = {key: sorted({str(run["made_by"][key]) for run in runs}) for key in ("commit", "machine")}
    hours = sum(run.get("seconds", 0.0) for run in runs) / 3600
    remarks = sorted({run["remark"] for run in runs if run.get("remark")})
    claims = "".join(f"- {claim}: {verdict}\n" for claim, verdict in module.claims(found).items())
    return (
        f"### {experiment} on {dataset}\n{SETTINGS[dataset].about}.\n\n"
        + module.table(found, dataset).to_markdown()
        + "".join(f"\n\\* {remark}" for remark in remarks)
        + f"\n![{experiment} on {dataset}](../results/{experiment}/{dataset}.png)\n\n"
        + f"What the paper says of it, here:\n\n{claims}\n"
        + f"`{_command(experiment, dataset)}`; {len(runs)} runs, seeds {', '.join(map(str, seeds))}, "
        + (f"{hours:.1f} hours of training, " if hours else "")
        + f"commit {', '.join(made_by['commit'])}, {', '.join(made_by['machine'])}.\n\n"
    )


def _command(experiment: str, dataset: str) -> str:
    data = " --data ROOT" if SETTINGS[dataset].needs_data else ""
    return f"proxygml paper {experiment} --dataset {dataset}{data}"
