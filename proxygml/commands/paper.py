"""proxygml paper."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from proxygml.commands.stopping import told_to_go_on
from proxygml.display import drawn_progress, output, show_table


def paper(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    dataset: str = "glyphs",
    data: Path | None = None,
    seeds: int = 3,
    only: tuple[str, ...] = (),
    protocol: Literal["paper", "fair"] = "paper",
    jobs: int | None = None,
    executor: Literal["local", "ray", "slurm"] = "local",
    quick: bool = False,
    render: bool = False,
    report: bool = False,
) -> None:
    """Make a table or figure of the paper; without a name, list them.

    `proxygml paper modules` trains what results/modules/glyphs.json lacks, three seeds of each row, keeps every
    finished run at once, and draws table and figure beside it. After Ctrl-C the same command goes on. Datasets: glyphs
    (nothing to download), omniglot and cub-small are small enough for a CPU; cub, cars and sop are what the paper ran,
    for a GPU.

    Args:
        name: Which table or figure.
        dataset: What to run it on.
        data: Folder of that dataset.
        seeds: Runs of each row, with the seeds 0, 1, ...
        only: Rows to run, by their names in the table [default: all].
        protocol: As in the paper, where test classes choose the best epoch; or fair: settings are chosen on held-out
            training classes, with equal trials for all, and test classes are scored once.
        jobs: Runs at a time [default: one for each core, or one on a GPU].
        executor: Where runs are made: on this machine, on a Ray cluster (RAY_ADDRESS) or as SLURM jobs
            (SBATCH_PARTITION and what else sbatch reads from its environment).
        quick: Two epochs on thirty classes, one seed, into runs/quick: does everything work?
        render: Draw from results/ alone; without a name, everything, as --report does.
        report: Write docs/results.md from results/, and draw all that stands in it.
    """
    from proxygml import experiments
    from proxygml.experiments import rendering, running
    from proxygml.experiments.executors import Executor

    if report or (render and name is None):
        output.print(rendering.write_report(), highlight=False)
        return
    if name is None:
        for known in experiments.EXPERIMENTS:
            module = experiments.find(known)
            title = f"{module.IN_THE_PAPER}: {str(module.__doc__).splitlines()[0]}"
            output.print(f"{known:14s}{title}", highlight=False, markup=False)
        return
    results = Path("runs/quick") if quick else Path("results")
    experiments.find(name)
    if not render:
        for what, number in (("seed", seeds), ("job", jobs)):
            if number is not None and number < 1:
                raise ValueError(f"expected at least one {what}, got {number}")
        with told_to_go_on(lambda: "the same command goes on"), drawn_progress() as progress:
            running.run_experiment(
                name,
                dataset,
                None if data is None else str(data),
                seeds=range(1 if quick else seeds),
                only=only,
                protocol=protocol,
                quick=quick,
                results=results,
                executor=Executor(executor, jobs),
                progress=progress,
            )
    table, remarks = rendering.render(name, dataset, protocol, results, quick=quick)
    show_table(table)
    for remark in remarks:
        output.print(remark, highlight=False, markup=False)
    path = rendering.protocol_file(results, name, dataset, protocol)
    for ending in (".png", ".svg", ".md", ".csv", ".tex"):
        output.print(f"  {path.with_suffix(ending)}", highlight=False, markup=False)
