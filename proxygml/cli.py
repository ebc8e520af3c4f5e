"""The command line. Its options are the fields of a Recipe, so that none is written twice."""

import importlib
import itertools
import os
import shlex
import signal
import sys
import warnings
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from proxygml import methods
from proxygml.display import (
    drawn_progress,
    is_first_process,
    messages,
    output,
    program,
    show_losses,
    show_run,
    show_scores,
    show_table,
)
from proxygml.recipes import GLYPHS, PRESETS, Recipe
from proxygml.version import __version__

MOST_FINDINGS = 50  # lines of a check that found more


def train(
    recipe: Recipe = GLYPHS,
    out: Path | None = None,
    resume: Path | None = None,
    like: Literal["fair", "native"] | None = None,
    json: bool = False,
) -> None:
    """Train a network and score it on classes that it has never seen.

    `proxygml train glyphs` trains on embedded letters in a few minutes; every setting of the preset can be changed:
    `proxygml train glyphs --epochs 4 --embedding-dim 64`. The run is a folder with recipe, log, checkpoints, scores
    and pictures. After Ctrl-C, a crash or a full disk, `proxygml train --resume FOLDER` goes on after the last finished
    epoch.

    Args:
        out: Folder of the new run [default: runs/DATASET-DATE-TIME].
        resume: Folder of a run to go on with; its own recipe is used.
        like: Run the --loss in ProxyGML's setting (fair) or in that of its own paper or code (native); what else is
            given on the command line comes on top.
        json: Print the scores as JSON.
    """
    if resume is not None and (out is not None or like is not None or recipe != GLYPHS):
        raise ValueError("--resume goes on with the run's own recipe and folder: leave out every other setting")
    from proxygml import training

    folder = resume or out or Path("runs") / f"{recipe.dataset}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        with drawn_progress() as progress:
            if resume is not None:
                run = training.resume(folder, progress=progress)
            else:
                if like == "native" and recipe.loss in methods.UNKNOWN:
                    messages.print(f"native {recipe.loss}: {methods.UNKNOWN[recipe.loss]}", highlight=False)
                run = training.train(recipe, folder, progress=progress)
    except KeyboardInterrupt:
        if (folder / "recipe.json").exists() and is_first_process():
            messages.print(f"go on with: {program()} train --resume {shlex.quote(str(folder))}", highlight=False)
        raise
    if not is_first_process():
        return
    if json:
        output.print_json(data=run.scores)
    else:
        show_run(run.folder, run.recipe, run.scores)


def embed(
    run: Annotated[Path, tyro.conf.Positional],
    out: Path,
    split: Literal["test", "train"] = "test",
    dataset: str | None = None,
    data: Path | None = None,
) -> None:
    """Turn images into vectors with the network of a run, and keep them with labels and paths in one .npz.

    Args:
        run: Folder of a trained run.
        out: The .npz to write.
        split: Which half of the dataset.
        dataset: Another dataset than the run's own.
        data: Folder of that dataset.
    """
    from proxygml import ingredients, training
    from proxygml.runs import Run

    trained = Run.open(run)
    recipe = trained.recipe
    if dataset is not None:
        recipe = recipe.changed({"dataset": dataset, "data": None, "classes": None})
    if data is not None:
        recipe = recipe.changed({"data": str(data)})
    images = ingredients.load_images(recipe)[0 if split == "train" else 1]
    with drawn_progress() as progress:
        images, broken = ingredients.usable(images, recipe, None, partial(progress, "checking images", note=""))
        if broken:
            progress("skipped", 0, 0, f"{broken} images that cannot be read")
        result = training.embed_images(trained, images, progress=progress)
    if not is_first_process():
        return
    result.save(out)
    output.print(
        f"{len(result.vectors)} vectors of {result.vectors.shape[1]} dimensions in {out}", highlight=False, markup=False
    )


def evaluate(
    embeddings: Annotated[Path, tyro.conf.Positional],
    gallery: Path | None = None,
    recall_at: tuple[int, ...] = (1, 2, 4, 8),
    cluster: bool = True,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Score vectors: Recall@n, R-precision, MAP@R and the NMI of a k-means clustering.

    Args:
        embeddings: An .npz with `vectors` (M, D) and integer `labels` (M,), from `proxygml embed` or your own.
        gallery: Another .npz to search in; without it, each vector is searched among all others.
        recall_at: The n of Recall@n.
        cluster: Also cluster the vectors and report NMI.
        seed: Of the clustering.
        json: Print the scores as JSON.
    """
    from proxygml.embeddings import Embeddings
    from proxygml.evaluation import evaluate as score

    queries = Embeddings.load(embeddings)
    searched = None if gallery is None else Embeddings.load(gallery)
    with drawn_progress() as progress:
        scores = score(
            queries.vectors,
            queries.labels,
            recall_at=recall_at,
            gallery=None if searched is None else searched.vectors,
            gallery_labels=None if searched is None else searched.labels,
            cluster=cluster,
            seed=seed,
            progress=partial(progress, "scoring", note=""),
        ).to_json()
    if json:
        output.print_json(data=scores)
    else:
        show_scores({embeddings.name: scores}, heading="%")


def datasets(
    action: Annotated[Literal["list", "check"], tyro.conf.Positional] = "list",
    name: Annotated[str | None, tyro.conf.Positional] = None,
    root: Annotated[Path | None, tyro.conf.Positional] = None,
) -> None:
    """List the datasets, or check one: `proxygml datasets check cub ROOT`.

    The check counts classes and images of both halves against the published numbers, decodes every image and says in
    one line each what is missing or broken; its exit code is 1 if anything is.

    Args:
        action: List all, or check one.
        name: Which one to check.
        root: Its folder (of table: the file).
    """
    from proxygml.datasets import DATASETS, load
    from proxygml.datasets.check import compare_counts, find_problems

    modules = {known: importlib.import_module(f"proxygml.datasets.{known}") for known in DATASETS}
    if action == "list":
        for known, module in modules.items():
            output.print(f"{known:10s}{module.__doc__.splitlines()[0]}", highlight=False, markup=False)
        return
    if name is None:
        raise ValueError(f"expected the name of a dataset to check, one of {', '.join(DATASETS)}")
    train_images, test_images = load(name, root)
    findings = []
    if hasattr(modules[name], "PUBLISHED"):
        findings += compare_counts(train_images, test_images, modules[name].PUBLISHED)
    for split, images in [("train", train_images), ("test", test_images)]:
        output.print(f"{split}: {len(images.class_names):,} classes, {len(images):,} images", highlight=False)
        with drawn_progress() as progress:
            told = partial(progress, f"opening {split} images", note="")
            problems = find_problems(images, decode=True, progress=told)
        findings += [f"{problem.path}: {problem.reason}" for problem in problems]
    for finding in findings[:MOST_FINDINGS]:
        output.print(finding, highlight=False, markup=False)
    if len(findings) > MOST_FINDINGS:
        output.print(f"and {len(findings) - MOST_FINDINGS:,} more", highlight=False)
    output.print(f"{len(findings):,} findings" if findings else "all is there and can be read", highlight=False)
    if findings:
        sys.exit(1)


def losses(json: bool = False) -> None:
    """List the losses: paper, what each needs of the trainer, and where its implementation comes from.

    Args:
        json: Print the list as JSON.
    """
    from dataclasses import asdict

    from proxygml.losses import METHODS

    if json:
        output.print_json(data={name: asdict(method) for name, method in METHODS.items()})
    else:
        show_losses(METHODS)


def paper(
    name: Annotated[str | None, tyro.conf.Positional] = None,
    dataset: str = "glyphs",
    data: Path | None = None,
    seeds: int = 3,
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
        protocol: As in the paper, where test classes choose the best epoch; or fair: settings are chosen on held-out
            training classes, with equal trials for all, and test classes are scored once.
        jobs: Runs at a time [default: one for each core, or one on a GPU].
        executor: Where runs are made: on this machine, on a Ray cluster (RAY_ADDRESS) or as SLURM jobs
            (SBATCH_PARTITION and what else sbatch reads from its environment).
        quick: Two epochs on thirty classes, one seed, into runs/quick: does everything work?
        render: Draw from results/ alone.
        report: Write docs/results.md from results/.
    """
    from proxygml import experiments
    from proxygml.experiments import rendering, running
    from proxygml.experiments.executors import Executor

    if report:
        output.print(rendering.write_report(), highlight=False)
        return
    if name is None:
        for known in experiments.EXPERIMENTS:
            module = experiments.find(known)
            title = f"{module.IN_THE_PAPER}: {module.__doc__.splitlines()[0]}"
            output.print(f"{known:14s}{title}", highlight=False, markup=False)
        return
    results = Path("runs/quick") if quick else Path("results")
    experiments.find(name)
    if not render:
        if seeds < 1 or (jobs is not None and jobs < 1):
            raise ValueError(f"expected at least one seed and one job, got {seeds} and {jobs}")
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends what runs in other processes, as Ctrl-C does
        with drawn_progress() as progress:
            running.run_experiment(
                name,
                dataset,
                None if data is None else str(data),
                seeds=range(1 if quick else seeds),
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


def _presets(arguments: list[str]) -> type:
    """The presets as a type of which each is a subcommand; --like changes them before other settings do."""
    words = [part for each in arguments for part in (each.split("=", 1) if each.startswith("--") else [each])]
    given = dict(itertools.pairwise(words))  # --loss ms, or --loss=ms
    recipes = {name: recipe for name, (_, recipe) in PRESETS.items()}
    if "--like" in given:
        if given["--like"] not in ("fair", "native"):
            raise ValueError(f"expected --like fair or --like native, got {given['--like']}")
        chosen = next((name for name in arguments if name in recipes), None)
        if chosen is None or (given["--like"] == "native" and not chosen.startswith("paper-")):
            wanted = "a preset of the paper" if given["--like"] == "native" else "a preset"
            raise ValueError(f"--like {given['--like']} changes {wanted}: proxygml train paper-cub --like ...")
        recipe = recipes[chosen]
        dataset = given.get("--dataset", recipe.dataset)
        recipes[chosen] = recipe.changed(methods.settings(given.get("--loss", recipe.loss), given["--like"], dataset))
    descriptions = {name: description for name, (description, _) in PRESETS.items()}
    return tyro.extras.subcommand_type_from_defaults(recipes, descriptions, prefix_names=False)


def main(arguments: list[str] | None = None) -> None:
    """The command `proxygml`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not is_first_process() and arguments[:1] not in (["train"], ["embed"]):  # the others need one process
        return
    if arguments == ["--version"]:
        output.print(f"proxygml {__version__}", highlight=False)
        return
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            train.__annotations__["recipe"] = Annotated[_presets(arguments), tyro.conf.arg(name="")]
            tyro.extras.subcommand_cli_from_dict(
                {
                    "train": train,
                    "embed": embed,
                    "evaluate": evaluate,
                    "datasets": datasets,
                    "losses": losses,
                    "paper": paper,
                },
                prog="proxygml",
                description="Deep metric learning with fewer proxies. Start with: proxygml train glyphs",
                args=arguments,
                config=(tyro.conf.CascadeSubcommandArgs, tyro.conf.OmitArgPrefixes),
            )
    except KeyboardInterrupt:
        if is_first_process():
            messages.print("stopped", highlight=False)
        sys.exit(130)
    except Exception as error:
        if os.environ.get("PROXYGML_TRACEBACK"):
            raise
        from proxygml.launching import may_speak

        expected = isinstance(error, (ValueError, OSError, ModuleNotFoundError))
        what = str(error) if expected else f"{type(error).__name__}: {error} (PROXYGML_TRACEBACK=1 shows where)"
        if may_speak(error):
            messages.print("error: " + " ".join(what.split()), style="red", highlight=False, markup=False)
        sys.exit(1)


def _show_warning(message: Warning | str, *where: object) -> None:
    if is_first_process():
        messages.print(f"warning: {message}", highlight=False, markup=False)
