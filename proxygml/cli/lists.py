"""proxygml datasets and proxygml losses."""

import importlib
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from proxygml.cli.display import show_losses
from proxygml.display import counted, counter, in_one_line, output, show_progress

MAX_FINDINGS = 50  # lines that a check prints


def datasets(
    action: Annotated[Literal["list", "check"], tyro.conf.Positional, tyro.conf.arg(metavar="[list|check]")] = "list",
    name: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = None,
    root: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[ROOT]")] = None,
) -> None:
    """List the datasets, or check one: `proxygml datasets check cub ROOT`.

    The check compares the counts of classes and images with the published numbers, decodes every image and prints one
    line for each problem; its exit code is 1 if there is any.

    Args:
        action: List all, or check one.
        name: The dataset to check.
        root: Its folder (for table: the file).
    """
    from proxygml.data import DATASETS, load
    from proxygml.data.check import compare_counts, find_problems

    modules = {each: importlib.import_module(f"proxygml.data.{each}") for each in DATASETS}
    if action == "list":
        for each, module in modules.items():
            output.print(f"{each:10s}{str(module.__doc__).splitlines()[0]}")
        return
    if name is None:
        raise ValueError(f"expected the name of a dataset to check, one of {', '.join(DATASETS)}")
    train_images, test_images = load(name, root)
    findings = []
    if hasattr(modules[name], "PUBLISHED"):
        findings += compare_counts(train_images, test_images, modules[name].PUBLISHED)
    for split, images in [("train", train_images), ("test", test_images)]:
        output.print(f"{split}: {counted(len(images.class_names), 'class')}, {counted(len(images), 'image')}")
        with show_progress() as progress:
            report = counter(progress, f"opening {split} images")
            problems = find_problems(images, progress=report)
        findings += [f"{in_one_line(problem.path)}: {problem.reason}" for problem in problems]
    for finding in findings[:MAX_FINDINGS]:
        output.print(finding)
    if len(findings) > MAX_FINDINGS:
        output.print(f"and {len(findings) - MAX_FINDINGS:,} more")
    output.print(f"problems: {len(findings):,}" if findings else "no problems: all images can be read")
    if findings:
        sys.exit(1)


def losses(json: bool = False) -> None:
    """List the losses: paper, type of batches, and source of the implementation.

    Args:
        json: Print the list as JSON.
    """
    from dataclasses import asdict

    from proxygml.losses import METHODS

    if json:
        output.print_json(data={name: asdict(method) for name, method in METHODS.items()})
    else:
        show_losses(METHODS)
