"""proxygml embed and proxygml evaluate."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from proxygml.cli.display import first_photo, show_next
from proxygml.cli.objects import import_object
from proxygml.cli.options import AS_TRAINED, SILENT, Hardware
from proxygml.cli.stopping import resume_hint
from proxygml.display import Progress, counted, counter, output, show_progress, show_scores
from proxygml.distributed.launch import is_first_process, join_processes
from proxygml.training.recipe import Split, is_class_name

if TYPE_CHECKING:
    from proxygml.data import ImageList
    from proxygml.embeddings import Embeddings
    from proxygml.model import Model

PRETRAINED = "efficientnet-lite0"  # small and good on a CPU; its weights are an installable package


def embed(
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|IMAGES")],
    hardware: Hardware = AS_TRAINED,
    *,
    out: Path,
    run: Annotated[Path | None, SILENT] = None,
    split: Split | None = None,
    dataset: str | None = None,
    data: Path | None = None,
    skip_broken: bool = False,
) -> None:
    """Embed images with a trained or pretrained network, and write vectors, labels and paths to one .npz.

    `proxygml embed PHOTOS --out features.npz` embeds all photos below a folder; they need no classes.

    Args:
        source: Folder of a trained run, or of images (at any depth; the parent folder is the class).
        hardware: What embeds images.
        out: The .npz to write.
        run: What embeds a folder of images: a trained run, or a pretrained backbone by its name (default:
            efficientnet-lite0).
        split: Of a run: the test or the training half of its dataset, or all of it (default: all of a --dataset of your
            own images, otherwise test).
        dataset: Of a run: another dataset than its own.
        data: Of a run: folder of that dataset, or of its own, if it has moved.
        skip_broken: Skip and count images that cannot be read, even if training did not.
    """
    if out.is_dir():
        raise ValueError(
            f"expected a file to write as --out, got the folder {out}: name one, such as {out / 'vectors.npz'}"
        )
    with resume_hint(lambda: "the same command starts again"):
        from proxygml.model import kind_of

        if is_folder := kind_of(source, ("run", "model", "images")) == "images":
            if split or dataset or data:
                raise ValueError(f"--split, --dataset and --data belong to a run, and {source} is a folder of images")
            model = hardware.load(run or PRETRAINED)
        elif run is not None:
            raise ValueError(f"--run embeds a folder of images, and {source} is a run itself: name only one of them")
        else:
            model = hardware.load(source)
        join_processes()
        with show_progress() as progress:
            parts = _images_below(source) if is_folder else _run_images(model, split, dataset, data)
            result = embed_images(model, parts, skip_broken or model.recipe.skip_broken, progress)
        if not is_first_process():
            return
        result.save(out)
    labels = (
        f"{result.unlabeled:,} without labels"
        if result.unlabeled
        else counted(len(set(result.labels.tolist())), "class")
    )
    output.print(f"{counted(len(result), 'vector')} of {counted(result.dim, 'dimension')} in {out}, {labels}")
    images, network = (
        (source, run or PRETRAINED) if is_folder else (data or (model.recipe.data if dataset is None else None), source)
    )
    photo = None if images is None else first_photo(Path(images))
    show_next(
        (["evaluate", out if not result.unlabeled else ""], "their scores"),
        (["search", out, "--image", photo or "", "--run", network], "those most similar to a photo"),
        (["browse", out, *(("--data", images) if photo else ())], "neighbors, errors and a map of the space"),
    )


def _images_below(folder: Path) -> "list[ImageList]":
    from proxygml.data.folder import images_below

    return [images_below(folder)]


def _run_images(model: "Model", split: Split | None, dataset: str | None, data: Path | None) -> "list[ImageList]":
    """The images of a run, or of another dataset, by split."""
    from proxygml.training.build import load_images

    changes: dict[str, object] = {"dataset": dataset, "data": None, "classes": None} if dataset is not None else {}
    changes |= {"data": str(data)} if data is not None else {}
    recipe = model.recipe.changed(changes)
    own_object = import_object(dataset) if dataset is not None and is_class_name(dataset) else None
    both = load_images(recipe, own_object) if changes else tuple(model.load_images().values())
    split = split or ("all" if dataset in ("folder", "table", "tar") else "test")
    parts = [images for part, images in zip(("train", "test"), both, strict=True) if split in (part, "all")]
    if not any(map(len, parts)):
        raise ValueError(f"{model.run.folder} has no {split} images: choose another --split")
    return parts


def embed_images(model: "Model", parts: "list[ImageList]", skip_broken: bool, progress: Progress) -> "Embeddings":
    """Embeddings of images; unreadable ones are an error, or skipped."""
    from proxygml.data.readable import describe_skipped, readable_images
    from proxygml.embeddings import concatenate

    results = []
    for images in filter(len, parts):
        readable = readable_images(images, skip_broken=skip_broken, progress=counter(progress, "checking images"))
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
    from proxygml.vectors import open_vectors, read_all, require_labels

    with show_progress() as progress:

        def read(location: str) -> "Embeddings":
            source = open_vectors(location, split=split, data=data, load=hardware.load, progress=progress)
            return require_labels(read_all(source), location)

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
