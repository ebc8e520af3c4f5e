"""The command line: train, embed, evaluate. Its options are the fields of a Recipe, so none is written twice."""

import shlex
import shutil
import sys
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from proxygml.recipes import GLYPHS, PRESETS, Recipe
from proxygml.version import __version__

output = Console(soft_wrap=True)
messages = Console(stderr=True, soft_wrap=True)

PresetRecipe = tyro.extras.subcommand_type_from_defaults(
    {name: recipe for name, (_, recipe) in PRESETS.items()},
    {name: description for name, (description, _) in PRESETS.items()},
    prefix_names=False,
)


def train(
    recipe: Annotated[PresetRecipe, tyro.conf.arg(name="")] = GLYPHS,
    out: Path | None = None,
    resume: Path | None = None,
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
        json: Print the scores as JSON.
    """
    from proxygml import training

    with drawn_progress() as progress:
        if resume is not None:
            run = training.resume(resume, progress=progress)
        else:
            folder = out or Path("runs") / f"{recipe.dataset}-{datetime.now():%Y%m%d-%H%M%S}"
            messages.print(f"run folder {folder}", highlight=False)
            run = training.train(recipe, folder, progress=progress)
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
    from proxygml import embeddings, training
    from proxygml.runs import Run

    trained = Run.open(run)
    recipe = trained.recipe
    if dataset is not None:
        recipe = recipe.changed({"dataset": dataset, "classes": None})
    if data is not None:
        recipe = recipe.changed({"data": str(data)})
    images = training.load_images(recipe)[0 if split == "train" else 1]
    with drawn_progress() as progress:
        result = embeddings.embed(
            training.load_model(trained),
            training.test_crops(recipe, images),
            images.paths,
            workers=recipe.workers,
            progress=lambda done, total: progress("embedding", done, total, ""),
        )
    result.save(out)
    output.print(f"{len(result.vectors)} vectors of {result.vectors.shape[1]} dimensions in {out}", highlight=False)


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
            progress=lambda done, total: progress("searching", done, total, ""),
        ).to_json()
    if json:
        output.print_json(data=scores)
    else:
        show_scores({embeddings.name: scores})


def show_run(folder: Path, recipe: Recipe, scores: dict) -> None:
    """Scores of a finished run, where its pictures are, and what to do next."""
    named = {
        "raw pixels": scores.get("pixels"),
        "untrained network": scores.get("untrained"),
        f"trained with {recipe.loss}": scores["trained"],
    }
    show_scores({name: row for name, row in named.items() if row is not None})
    trained = scores["trained"]
    output.print(
        f"{trained['images']} images of {trained['classes']} classes never seen in training; "
        f"epoch {scores['best_epoch']} of {recipe.epochs}, {scores['seconds']:.0f} s of training",
        highlight=False,
    )
    for picture, what in [
        ("retrieval.png", "what it finds"),
        ("map.png", "a map of the space"),
        ("curves.png", "how it learned"),
    ]:
        output.print(f"  {what:20s}{folder / picture}", highlight=False)
    program = shlex.join(["proxygml"] if shutil.which("proxygml") else [Path(sys.executable).name, "-m", "proxygml"])
    if Path(sys.argv[0]).name == "proxygml":
        program = shlex.quote(sys.argv[0])  # as it was called, so that the next call works too
    output.print(
        "What next:\n"
        f"  {program} embed {folder} --out vectors.npz   gives vectors, labels and paths to your own code\n"
        f"  {program} train --help   lists every setting; try --epochs, --embedding-dim, --proxies-per-class\n"
        "  README.md, 'In your own loop', has the loss in five lines",
        highlight=False,
    )


def show_scores(rows: dict[str, dict]) -> None:
    """A table with one line per name, in percent."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("on unseen classes, %")
    metrics = [key for key in next(iter(rows.values())) if key.startswith("recall@")] + [
        "map_at_r",
        "r_precision",
        "nmi",
    ]
    titles = {"map_at_r": "MAP@R", "r_precision": "R-precision", "nmi": "NMI"}
    for metric in metrics:
        table.add_column(titles.get(metric, metric.replace("recall", "R")), justify="right")
    for name, row in rows.items():
        table.add_row(name, *("-" if row[metric] is None else f"{100 * row[metric]:.1f}" for metric in metrics))
    output.print(table)
    lone = max(row["lone_queries"] for row in rows.values())
    if lone:
        output.print(f"{lone} queries have no other image of their class: each counts as a miss", highlight=False)


@contextmanager
def drawn_progress():
    """A callback that draws what it is told as bars with time left; silent where no terminal watches."""
    bars = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=messages,
        disable=not messages.is_terminal,
    )
    tasks: dict[str, int] = {}

    def report(what: str, done: int, total: int, note: str) -> None:
        if what not in tasks:
            for task in bars.tasks:
                bars.update(task.id, visible=task.fields["lasting"])
            tasks[what] = bars.add_task(what, total=total, note=note, lasting=what == "training")
        bars.update(tasks[what], completed=done, total=total if total > 1 else None, note=note, visible=True)
        if done >= total and what != "training":
            bars.remove_task(tasks.pop(what))

    with bars:
        yield report


def main(arguments: list[str] | None = None) -> None:
    """The command `proxygml`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments == ["--version"]:
        output.print(f"proxygml {__version__}", highlight=False)
        return
    try:
        tyro.extras.subcommand_cli_from_dict(
            {"train": train, "embed": embed, "evaluate": evaluate},
            prog="proxygml",
            description="Deep metric learning with fewer proxies. Start with: proxygml train glyphs",
            args=arguments,
            config=(tyro.conf.CascadeSubcommandArgs, tyro.conf.OmitArgPrefixes),
        )
    except KeyboardInterrupt:
        messages.print("stopped; a run goes on with: proxygml train --resume FOLDER", highlight=False)
        sys.exit(130)
    except (ValueError, OSError) as error:
        messages.print(f"error: {error}", style="red", highlight=False, markup=False)
        sys.exit(1)
