"""proxygml embed and proxygml evaluate."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from proxygml.display import drawn_progress, output, show_scores
from proxygml.launching import is_first_process


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
