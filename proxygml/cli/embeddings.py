"""proxygml embed and proxygml evaluate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from proxygml.cli.objects import import_object
from proxygml.cli.options import AS_TRAINED, Hardware
from proxygml.cli.stopping import resume_hint
from proxygml.display import Progress, counter, output, show_progress, show_scores
from proxygml.distributed.launch import is_first_process, join_processes
from proxygml.training.recipe import Split, is_class_name

if TYPE_CHECKING:
    from proxygml.embeddings import Embeddings
    from proxygml.model import Model


def embed(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    hardware: Hardware = AS_TRAINED,
    *,
    out: Path,
    split: Split | None = None,
    dataset: str | None = None,
    data: Path | None = None,
    skip_broken: bool = False,
) -> None:
    """Embed images with the network of a run, and write vectors, labels and paths to one .npz.

    Args:
        run: Folder of a trained run.
        hardware: What embeds images.
        out: The .npz to write.
        split: The test or the training half of the dataset, or all of it (default: all of your own --data, otherwise
            test).
        dataset: Another dataset than the run's own.
        data: Folder of that dataset, or of the run's own, if it has moved. Without --dataset, for a run on glyphs: a
            folder of images, one folder per class.
        skip_broken: Skip and count images that cannot be read, even if training did not.
    """
    with resume_hint(lambda: "the same command starts again"):
        model = hardware.load(run)
        join_processes()
        if data is not None and model.recipe.dataset == "glyphs":
            dataset = dataset or "folder"
        changes: dict[str, object] = {"dataset": dataset, "data": None, "classes": None} if dataset is not None else {}
        changes |= {"data": str(data)} if data is not None else {}
        changes |= {"skip_broken": True} if skip_broken else {}
        with show_progress() as progress:
            result = _embed(model, changes, split, progress)
        if not is_first_process():
            return
        result.save(out)
    output.print(f"{len(result)} vectors of {result.dim} dimensions in {out}")


def _embed(model: "Model", changes: dict, split: Split | None, progress: Progress) -> "Embeddings":
    """Embeddings of the run's images, after changes of its recipe."""
    from proxygml.data.readable import describe_skipped, readable_images
    from proxygml.embeddings import concatenate
    from proxygml.training.build import load_images

    recipe = model.recipe.changed(changes)
    own_object = import_object(recipe.dataset) if is_class_name(str(changes.get("dataset"))) else None
    other = {"dataset", "data"} & changes.keys()
    both = load_images(recipe, own_object) if other else tuple(model.load_images().values())
    own = "data" in changes and changes["data"] is not None and recipe.dataset in ("folder", "table", "tar")
    split = split or ("all" if own else "test")
    parts = [images for part, images in zip(("train", "test"), both, strict=True) if split in (part, "all")]
    if not any(map(len, parts)):
        raise ValueError(f"{model.run.folder} has no {split} images: choose another --split")
    results = []
    for images in filter(len, parts):
        checking = counter(progress, "checking images")
        readable = readable_images(images, skip_broken=recipe.skip_broken, progress=checking)
        if skipped := describe_skipped(images, readable):
            progress("skipped", 0, 0, skipped)
        results.append(model.embed(readable, progress=counter(progress, "embedding")))
    return concatenate(results)


def evaluate(
    embeddings: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|NPZ|INDEX")],
    hardware: Hardware = AS_TRAINED,
    gallery: str | None = None,
    split: Split = "test",
    data: Path | None = None,
    recall_at: tuple[int, ...] = (1, 2, 4, 8),
    cluster: bool = True,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Score vectors: Recall@n, R-precision, MAP@R and the NMI of a k-means clustering.

    Args:
        embeddings: An .npz with `vectors` (M, D) and `labels` (M,), from `proxygml embed` or your own; a run (its test
            images); or an index.
        hardware: What embeds images.
        gallery: Other vectors to search in; without it, each vector is searched among all others.
        split: The images of a run: only classes of its test images are new to it.
        data: Folder of the run's images, if they have moved.
        recall_at: The n of Recall@n.
        cluster: Also cluster the vectors and report NMI.
        seed: Of the clustering.
        json: Print the scores as JSON.
    """
    from proxygml.evaluation import evaluate as score
    from proxygml.vectors import open_vectors, read_all

    with show_progress() as progress:

        def read(location: str) -> "Embeddings":
            return read_all(open_vectors(location, split=split, data=data, load=hardware.load, progress=progress))

        queries, searched = read(embeddings), None if gallery is None else read(gallery)
        scores = score(
            queries.vectors,
            queries.labels,
            recall_at=recall_at,
            gallery=None if searched is None else searched.vectors,
            gallery_labels=None if searched is None else searched.labels,
            cluster=cluster,
            seed=seed,
            progress=counter(progress, "scoring"),
        ).to_json()
    if json:
        output.print_json(data=scores)
    else:
        show_scores({Path(embeddings).name: scores}, heading="%")
