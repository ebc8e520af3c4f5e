"""What the command line shows: tables of scores, progress bars, what to do next."""

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from proxygml.losses import Method
from proxygml.paper import tables
from proxygml.training.recipe import Recipe

# What a terminal obeys instead of showing it, what turns the direction of a line, and halves of characters.
UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def spelled_out(text: str) -> str:
    """A text in which whatever a terminal would not show stands as it does in Python: \\x1b; lines and tabs stay."""
    return UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def in_one_line(name: str) -> str:
    """A name, as of a file, that cannot pretend to be lines of its own."""
    return spelled_out(name).replace("\n", "\\n").replace("\t", "\\t")


class PlainConsole(Console):
    """A console on which names of files and classes stay what they are: [red], :smile: and escapes are only text."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, soft_wrap=True, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """What rich makes of every text that it is given, also of those in tables."""
        return super().render_str(spelled_out(text), **options)


output = PlainConsole(width=None if sys.stdout.isatty() else 1000)  # a pipe has no width to cut tables to
messages = PlainConsole(stderr=True)


def show_run(folder: Path, recipe: Recipe, scores: dict) -> None:
    """Scores of a finished run, where its pictures are, and what to do next."""
    named = {
        "raw pixels": scores.get("pixels"),
        "frozen backbone" if recipe.weights else "untrained network": scores.get("untrained"),
        f"trained with {recipe.loss}" + (" *" if "remark" in scores else ""): scores.get("trained"),
        "on held-out training classes": None if "trained" in scores else scores.get("held_out"),
    }
    rows = {name: row for name, row in named.items() if row is not None}
    if rows:
        show_scores(rows, heading="on unseen classes, %")
        scored = list(rows.values())[-1]
        output.print(
            f"{scored['images']} images of {scored['classes']} classes never seen in training; "
            f"epoch {scores['best_epoch']} of {recipe.epochs}, {scores['seconds']:.0f} s of training",
            highlight=False,
        )
    if "remark" in scores:
        output.print(f"* {scores['remark']}", highlight=False, markup=False)
    for picture, what in [
        ("retrieval.png", "what it finds"),
        ("map.png", "a map of the space"),
        ("curves.png", "how it learned"),
    ]:
        if (folder / picture).exists():
            output.print(f"  {what:20s}{folder / picture}", highlight=False, markup=False)
    quoted = shlex.quote(str(folder))
    output.print(
        "What next:\n"
        f"  {program()} browse {quoted}   shows neighbors, mistakes and a map of the space\n"
        f"  {program()} embed {quoted} --out vectors.npz   gives vectors, labels and paths to your own code\n"
        f"  {program()} train --help   lists every setting; try --epochs, --embedding-dim, --proxies-per-class\n"
        "  README.md, 'Use the loss', shows the loss in your own training loop",
        highlight=False,
        markup=False,
    )


def program() -> str:
    """How this program was called, so that it can be called so again."""
    return shlex.quote(sys.argv[0]) if Path(sys.argv[0]).name == "proxygml" else "python -m proxygml"


def show_scores(rows: dict[str, dict], *, heading: str) -> None:
    """A table with one line per name, in percent."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column(heading, no_wrap=True)
    recalls = [key for key in next(iter(rows.values())) if key.startswith("recall@")]
    metrics = [*recalls, "map_at_r", "r_precision", "nmi"]
    titles = {"map_at_r": "MAP@R", "r_precision": "R-precision", "nmi": "NMI"}
    for metric in metrics:
        table.add_column(titles.get(metric, metric.replace("recall", "R")), justify="right")
    for name, row in rows.items():
        table.add_row(name, *("-" if row[metric] is None else f"{100 * row[metric]:.1f}" for metric in metrics))
    output.print(table)
    lone = max(row["lone_queries"] for row in rows.values())
    if lone:
        output.print(f"{lone} queries have no image of their class to find: each counts as a miss", highlight=False)


def show_losses(methods: Mapping[str, Method]) -> None:
    """A table with one line per loss, and below it what is uncertain about some."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("--loss", "paper", "batches", "embeddings", "implementation"):
        table.add_column(column, no_wrap=True)
    for name, method in methods.items():
        batches = f"{method.images_per_class} of a class, {method.batches}"
        network = "" if method.network == "plain" else f", {method.network}"
        table.add_row(
            name,
            f"{method.title}: {method.paper}",
            "shuffled" if method.batches == "shuffled" else batches,
            ("unit length" if method.unit_length else "as they come") + network,
            method.source + (" *" if method.caveat else ""),
        )
    output.print(table)
    for name, method in methods.items():
        if method.caveat:
            output.print(f"* {name}: {method.caveat}", highlight=False, markup=False)


def show_table(rows: tables.Table) -> None:
    """A table of an experiment."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, column in enumerate(rows.columns):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    for row in rows.rows:
        table.add_row(*row)
    output.print(table)


class Report(Protocol):
    """What is told of work that takes long: what goes on, how much is done, of how much (0: a remark), a note."""

    def __call__(self, what: str, done: int, total: int, note: str) -> None: ...


@contextmanager
def drawn_progress() -> Iterator[Report]:
    """A callback that draws what it is told as bars with time left; silent where no terminal watches."""
    # The note gives way where the terminal is narrow.
    elapsed, left = (Column(no_wrap=True, min_width=len("0:00:00")) for _ in range(2))
    bars = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=12),
        TimeElapsedColumn(table_column=elapsed),
        TextColumn("left"),
        TimeRemainingColumn(table_column=left),
        TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=messages,
        disable=not messages.is_terminal,
    )
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int, note: str) -> None:
        note = spelled_out(note)
        if total == 0:
            messages.print(f"{what}: {note}", highlight=False, markup=False)
            return
        if what not in tasks:
            for task in bars.tasks:
                bars.update(task.id, visible=task.fields["lasting"])
            tasks[what] = bars.add_task(what, total=total, note=note, lasting=what == "training")
        bars.update(tasks[what], completed=done, total=total if total > 1 else None, note=note, visible=True)
        if done >= total and what != "training":
            bars.remove_task(tasks.pop(what))

    with bars:
        yield report
