"""What commands print: the result of a run with next steps, and the table of losses."""

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from proxygml.display import output, show_table
from proxygml.losses import Method
from proxygml.training.recipe import Recipe, is_class_name
from proxygml.training.summary import show_result


def show_run(folder: Path, recipe: Recipe, scores: dict) -> None:
    """Print the scores of a finished run, the paths of its pictures, and next steps."""
    show_result(recipe, scores)
    for picture, what in [
        ("retrieval.png", "retrieval examples"),
        ("map.png", "map of the space"),
        ("curves.png", "training curves"),
    ]:
        if (folder / picture).exists():
            output.print(f"  {what:20s}{folder / picture}")
    quoted, own = shlex.quote(str(folder)), is_class_name(recipe.dataset)
    images = " --dataset MODULE:NAME" if own else ""  # of your own, which the run does not store
    if recipe.test and "trained" not in scores:  # no test images
        images += " --split train"
    output.print(
        "What next:\n"
        f"  {program()} embed {quoted}{images} --out vectors.npz   writes vectors, labels and paths for your own code\n"
        f"  {program()} browse {'vectors.npz' if own else quoted}   shows neighbors, errors and a map of the space\n"
        f"  {program()} train --help   lists every setting; try --epochs, --embedding-dim, --proxies-per-class\n"
        "  README.md, 'Use the loss', shows the loss in your own training loop"
    )


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
