"""proxygml embed and proxygml evaluate."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import tyro

from proxygml.cli.display import Report, drawn_progress, output, show_scores
from proxygml.cli.stopping import told_to_go_on
from proxygml.distributed.launch import is_first_process

Split = Literal["test", "train", "all"]

if TYPE_CHECKING:
    from proxygml.data import ImageList
    from proxygml.embeddings import Embeddings


def embed(
    run: Annotated[Path | None, tyro.conf.Positional] = None,
    *,
    out: Path,
    model: Path | None = None,
    split: Split | None = None,
    dataset: str | None = None,
    data: Path | None = None,
    skip_broken: bool = False,
) -> None:
    """Turn images into vectors with the network of a run, and keep them with labels and paths in one .npz.

    Args:
        run: Folder of a trained run.
        out: The .npz to write.
        model: Instead of a run the model.onnx that `proxygml export` wrote of it, which needs no torch.
        split: The test or the train half of the dataset, or all of it. Unless it is said: all of the --data that you
            name here if it is your own folder, table or tar, and otherwise the test half.
        dataset: Another dataset than the run's own.
        data: Folder of that dataset; with --model and no --dataset your own images, a folder for each class.
        skip_broken: Leave out images that cannot be read, and count them, also if training did not.
    """
    if (run is None) == (model is None):
        raise ValueError(f"expected the folder of a run or --model model.onnx, got {'both' if run else 'neither'}")
    if model is not None and data is not None:
        dataset = dataset or "folder"
    changes: dict[str, object] = {"dataset": dataset, "data": None, "classes": None} if dataset is not None else {}
    changes |= {"data": str(data)} if data is not None else {}
    changes |= {"skip_broken": True} if skip_broken else {}
    with told_to_go_on(lambda: "the same command begins again"):
        with drawn_progress() as progress:
            make = _embed_with_run if model is None else _embed_with_onnx
            result = make(cast(Path, run or model), changes, split, progress)
        if not is_first_process():
            return
        result.save(out)
    output.print(
        f"{len(result.vectors)} vectors of {result.vectors.shape[1]} dimensions in {out}", highlight=False, markup=False
    )


def _embed_with_run(folder: Path, changes: dict, split: Split | None, progress: Report) -> "Embeddings":
    from proxygml.data.readable import readable_images
    from proxygml.embeddings import concatenate
    from proxygml.training import build, evaluator
    from proxygml.training.run import Run

    run = Run.open(folder)
    recipe = run.recipe.changed(changes)
    found = []
    for images in _halves(build.load_images(recipe), split, recipe.dataset, changes):
        checked = partial(progress, "checking images", note="")
        readable = readable_images(images, skip_broken=recipe.skip_broken, progress=checked)
        _tell_skipped(len(images) - len(readable), progress)
        found.append(evaluator.embed_images(run, readable, progress=progress))
    return concatenate(found)


def _embed_with_onnx(path: Path, changes: dict, split: Split | None, progress: Report) -> "Embeddings":
    """The same without torch."""
    from proxygml import data
    from proxygml.data.check import find_problems, without_problems
    from proxygml.embeddings import concatenate
    from proxygml.export.runtime import OnnxModel
    from proxygml.training.recipe import Recipe

    model = OnnxModel.load(path)
    recipe = Recipe().changed(model.description.recipe | changes)
    both = data.load(
        recipe.dataset, recipe.data, size=recipe.image_size, classes=recipe.classes, test_fraction=recipe.test_fraction
    )
    found = []
    for images in _halves(both, split, recipe.dataset, changes):
        problems = find_problems(images, decode=True, progress=partial(progress, "checking images", note=""))
        images = without_problems(images, problems, skip=recipe.skip_broken)
        _tell_skipped(len(problems), progress)
        found.append(model.embed(images, progress=partial(progress, "embedding", note="")))
    return concatenate(found)


def _halves(
    both: "tuple[ImageList, ImageList]", split: Split | None, dataset: str, changes: dict
) -> "tuple[ImageList, ...]":
    """What is asked for: unless it is said, all images of one's own that were named now, otherwise the test half."""
    named_now = changes.get("data") is not None and dataset in ("folder", "table", "tar")
    train, test = both
    return {"train": (train,), "test": (test,), "all": both}[split or ("all" if named_now else "test")]


def _tell_skipped(broken: int, progress: Report) -> None:
    if broken:
        progress("skipped", 0, 0, f"{broken} images that cannot be read")


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
