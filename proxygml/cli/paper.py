"""proxygml paper."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from proxygml.cli.stopping import resume_hint
from proxygml.display import counted, output, show_progress, show_table
from proxygml.files import unknown_name
from proxygml.paper import EXPERIMENTS

if TYPE_CHECKING:
    from proxygml.paper.executors import Executor

QUEUE = "queue"
EXPERIMENT = tyro.conf.arg(metavar="[EXPERIMENT]", help=f"One of {', '.join(EXPERIMENTS)}, or {QUEUE}.")


def paper(
    name: Annotated[str | None, tyro.conf.Positional, EXPERIMENT] = None,
    dataset: str = "glyphs",
    data: Path | None = None,
    seeds: int | None = None,
    only: tuple[str, ...] = (),
    protocol: Literal["paper", "fair"] = "paper",
    jobs: int | None = None,
    executor: Literal["local", "slurm"] = "local",
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] | None = None,
    workers: int | None = None,
    runs: int | None = None,
    plan: bool = False,
    quick: bool = False,
    results: Path | None = None,
    work: Path | None = None,
    render: bool = False,
    report: bool = False,
) -> None:
    """Reproduce a table or figure of the paper; without a name, list them.

    `proxygml paper modules` trains the runs missing in results/modules/glyphs.json, a few seeds of each row, saves each
    when it finishes, and draws table and figure next to it. After Ctrl-C the same command continues. Datasets: glyphs
    needs no download; cars-head, cub-head, cars-small, cub-small, omniglot-sop and omniglot are small enough for a CPU;
    cub, cars and sop are what the paper ran, for a GPU.

    `proxygml paper queue --data ROOT` runs everything behind docs/results.md one after another, the most informative
    first;
    ROOT holds Cars196, CUB_200_2011 and omniglot28.npz. `--plan` shows what is left.

    Args:
        dataset: What to run it on.
        data: Folder of that dataset, or one that holds it.
        seeds: Runs of each row, with the seeds 0, 1, ... (default: 3, of modules 5).
        only: Rows to run, by their names in the table (default: all).
        protocol: As the setting has it, without tuning; or fair: settings are chosen on held-out training classes, with
            equal trials for all, and test classes are scored once.
        jobs: Runs at a time (default: one for each GPU, or for each core without GPUs, where the queue runs one).
        executor: Where to run: on this machine, or as SLURM jobs (SBATCH_PARTITION and what else sbatch reads from its
            environment).
        precision: Of all runs (default: that of the dataset's recipe). Finished runs stay, whatever their precision.
        workers: Processes of each run that decode images (default: those of the recipe).
        runs: Stop the queue after so many runs.
        plan: Show what is left in the queue, and about how long it takes, and run nothing.
        quick: Two epochs on 40 classes, one seed, into runs/quick: does everything work?
        results: Folder of finished runs (default: results).
        work: Folder of unfinished runs (default: runs/paper).
        render: Draw from results/ alone; without a name, everything, as --report does.
        report: Write docs/results.md from results/, and draw all that stands in it.
    """
    for what, number in (("seed", seeds), ("job", jobs), ("run", runs)):
        if number is not None and number < 1:
            raise ValueError(f"expected at least one {what}, got {number}")
    if name is None and not (report or render):
        for known, entry in EXPERIMENTS.items():
            output.print(f"{known:14s}{entry.in_the_paper}: {entry.title}", highlight=False, markup=False)
        return
    if name is not None and name not in (QUEUE, *EXPERIMENTS):
        raise unknown_name("an experiment", name, [*EXPERIMENTS, QUEUE])

    from proxygml.paper import find, rendering, running
    from proxygml.paper.executors import Executor
    from proxygml.paper.report import write_report

    if report or name is None:
        output.print(write_report(), highlight=False)
        return
    results = results or Path("runs/quick" if quick else "results")
    work = work or Path("runs/quick" if quick else "runs/paper")
    where = Executor(executor, jobs, precision, workers)
    if name == QUEUE:
        _queue(data, results, work, where, runs=runs, quick=quick, plan=plan)
        return
    about = find(name)
    if not render:
        with resume_hint(lambda: "the same command goes on"), show_progress() as progress:
            running.run_experiment(
                name,
                dataset,
                None if data is None else str(data),
                seeds=range(1 if quick else seeds or about.seeds),
                only=only,
                protocol=protocol,
                quick=quick,
                results=results,
                work=work,
                executor=where,
                progress=progress,
            )
    section = rendering.Section(name, dataset, protocol, results, quick)
    table, remarks = section.render()
    show_table(table.columns, table.rows)
    for remark in remarks:
        output.print(remark, highlight=False, markup=False)
    for ending in (".png", ".svg", ".md", ".csv", ".tex"):
        output.print(f"  {section.path.with_suffix(ending)}", highlight=False, markup=False)


def _queue(
    data: Path | None, results: Path, work: Path, executor: "Executor", *, runs: int | None, quick: bool, plan: bool
) -> None:
    from proxygml.paper import queue

    if data is None:
        raise ValueError("the queue needs a folder with Cars196, CUB_200_2011 and omniglot28.npz: --data ROOT")
    parts = queue.plan(str(data), results, quick=quick)
    left = queue.minutes_left(parts, results)
    if plan:
        rows = [
            (
                f"tier {part.tier}",
                part.name,
                f"{len(part.missing)} of {len(part.jobs)}",
                f"{left[part.name] / 60:.1f} h",
            )
            for part in parts
        ]
        show_table(("when", "what", "runs left", "about"), rows)
    total = sum(len(part.missing) for part in parts)
    output.print(f"{counted(total, 'run')} left, about {sum(left.values()) / 60:.1f} hours on one core")
    if plan or not total:
        return
    done = 0

    def on_run(part: str, run: dict) -> None:
        nonlocal done
        done += 1
        scores = run.get("scores", {})
        shown = "".join(f" {name} {100 * scores[name]:.1f}" for name in ("recall@1", "nmi") if name in scores)
        output.print(f"{part}: {run['row']}, seed {run['seed']}:{shown}; {counted(total - done, 'run')} left")

    with resume_hint(lambda: "the same command goes on"), show_progress() as progress:
        failed = queue.run_queue(
            str(data),
            results=results,
            work=work,
            executor=executor,
            most=runs,
            quick=quick,
            progress=progress,
            on_run=on_run,
        )
    if failed:
        raise ValueError(f"the queue had failures: {'; '.join(failed)}")
