"""What commands print: the result of a run with next steps, and the table of losses."""

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from proxygml.display import output, show_table
from proxygml.losses import Method
from proxygml.training.recipe import Recipe, is_class_name
from proxygml.training.summary import PICTURES, show_result


def show_run(folder: Path, recipe: Recipe, scores: dict) -> None:
    """Print the scores of a finished run, the paths of its pictures, and next steps."""
    show_result(recipe, scores)
    for picture, what in PICTURES.items():
        if (folder / picture).exists():
            output.print(f"  {what:45s}{folder / picture}")
    index = beside(folder, "index")
    images: list[object] = [folder]
    if is_class_name(recipe.dataset):  # of your own, which the run does not store
        images = ["--run", folder, "--dataset", recipe.dataset, *(("--data", recipe.data) if recipe.data else ())]
        images += ["--split", "test" if "trained" in scores or not recipe.test else "train"]
    photo = None if recipe.data is None else first_photo(Path(recipe.data))
    show_next(
        (["index", "build", *images, "--out", index], "all its images, to search in"),
        (["search", index, "--image", photo or ""], "those most similar to a photo"),
        (["browse", index if is_class_name(recipe.dataset) else folder], "neighbors, errors and a map of the space"),
        (["export", folder, beside(folder, "model")], "the network in a folder that works anywhere"),
    )


def show_next(*steps: tuple[Sequence[object], str]) -> None:
    """Print commands, which a shell can run as they are printed, and what they do; none with an empty word."""
    output.print("What next:")
    for words, what in steps:
        if "" not in words:
            output.print(f"  {program()} {shlex.join(map(str, words))}  # {what}")


def beside(path: Path, suffix: str) -> Path:
    """A name for what is made of a path: runs/small -> runs/small-index."""
    return path.with_name(f"{path.name or path.resolve().name}-{suffix}")


def first_photo(data: Path) -> Path | None:
    """An image in the folder of a dataset, or in that of its list; None if there is none."""
    from proxygml.data.folder import SUFFIXES

    below = (data if data.is_dir() else data.parent).rglob("[!.]*")
    images = (path for path in below if path.suffix.lower() in SUFFIXES and path.is_file())
    return next((path for path in images if data.is_dir() or path.parent != data.parent), None)


def program() -> str:
    """The command that started this program."""
    return shlex.quote(sys.argv[0]) if Path(sys.argv[0]).name == "proxygml" else "python -m proxygml"


def show_losses(methods: Mapping[str, Method]) -> None:
    """Print a table with one row per loss, and their caveats below it."""
    rows = [
        (
            name,
            f"{method.title}: {method.paper}",
            ("" if method.batches == "shuffled" else f"{method.images_per_class} of a class, ") + method.batches,
            ("unit length" if method.unit_length else "unnormalized")
            + ("" if method.network == "plain" else f", {method.network}"),
            method.source + (" *" if method.caveat else ""),
        )
        for name, method in methods.items()
    ]
    show_table(("--loss", "paper", "batches", "embeddings", "implementation"), rows, left=range(5))
    for name, method in methods.items():
        if method.caveat:
            output.print(f"* {name}: {method.caveat}")
