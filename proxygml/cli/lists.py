"""proxygml datasets and proxygml losses."""

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro

from proxygml.cli.display import drawn_progress, in_one_line, output, show_losses

MOST_FINDINGS = 50  # lines of a check that found more


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
    from proxygml.data import DATASETS, load
    from proxygml.data.check import compare_counts, find_problems

    modules = {known: importlib.import_module(f"proxygml.data.{known}") for known in DATASETS}
    if action == "list":
        for known, module in modules.items():
            output.print(f"{known:10s}{str(module.__doc__).splitlines()[0]}", highlight=False, markup=False)
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
        findings += [f"{in_one_line(problem.path)}: {problem.reason}" for problem in problems]
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
