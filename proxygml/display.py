"""What people see in a terminal or a notebook: progress bars and tables, from the command line and from Python."""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Column, Table
from rich.text import Text

# Control characters, marks that change the direction of text, and surrogates.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")

MIN_CLASSES, MIN_IMAGES = 10, 100  # scores on fewer are shown with a caution


def escape_control(text: str) -> str:
    """A text with control characters escaped as in Python (\\x1b), except line breaks and tabs."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def in_one_line(name: str) -> str:
    """A name, as of a file, with line breaks and tabs escaped too."""
    return escape_control(name).replace("\n", "\\n").replace("\t", "\\t")


def counted(number: int, noun: str) -> str:
    """A number of things: "1 image", "2,000 images", "3 classes", "4 queries"."""
    if number != 1:
        noun = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}es" if noun.endswith(("s", "x")) else f"{noun}s"
    return f"{number:,} {noun}"


def hide_passwords(text: str) -> str:
    """A text without passwords of databases, whose URLs may also stand where a path was expected."""
    text = re.sub(r"(postgres(?:ql)?:/+[^:@/?#\s]*):(?!\d+(?:[/?,\s]|$))[^@]*@(?:\S*@)?", r"\1@", text)  # no port
    return re.sub(r"([?&](?:ssl)?password=)[^&\s]*", r"\1...", text)


class PlainConsole(Console):
    """A console that prints names literally ([red], :smile: and escape sequences are only text), and no passwords."""

    def __init__(self, *, stderr: bool = False, width: int | None = None) -> None:
        super().__init__(stderr=stderr, width=width, soft_wrap=True, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:
        """Rich calls this for every text, including cells of tables."""
        return super().render_str(hide_passwords(escape_control(text)), **options)


output = PlainConsole(width=None if sys.stdout.isatty() else 1000)  # a pipe has no width to cut tables to
messages = PlainConsole(stderr=True)


def score_table(rows: dict[str, dict], *, heading: str, baseline: str = "") -> tuple[list[str], list[list[str]]]:
    """Columns and cells of scores by name, in percent, with differences to the row `baseline` if there is one."""
    recalls = {key: f"R{key[6:]}" for key in next(iter(rows.values())) if key.startswith("recall@")}
    metrics = {**recalls, "map_at_r": "MAP@R", "r_precision": "R-precision", "nmi": "NMI"}
    columns = [heading, *metrics.values()]
    cells = [
        [name, *("-" if row[metric] is None else f"{100 * row[metric]:.1f}" for metric in metrics)]
        for name, row in rows.items()
    ]
    if baseline in rows:
        first = next(iter(recalls))
        columns.append(f"{recalls[first]} vs. {baseline.split()[0]}")
        for line, row in zip(cells, rows.values(), strict=True):
            interval = " ({:+.1f} to {:+.1f})".format(*(100 * end for end in row["gain"][1:])) if "gain" in row else ""
            line.append(f"{100 * (row[first] - rows[baseline][first]):+.1f}{interval}" if line[0] != baseline else "")
        if any("gain" in row for row in rows.values()):
            columns[-1] += " (95 %)"
    return columns, cells


def show_scores(rows: dict[str, dict], *, heading: str, baseline: str = "") -> None:
    """Print a `score_table`, and what to keep in mind."""
    show_table(*score_table(rows, heading=heading, baseline=baseline))
    lone, images, classes = (max(row[key] for row in rows.values()) for key in ("lone_queries", "images", "classes"))
    if lone:
        output.print(f"{counted(lone, 'query')} without an image of the same class to find: each counts as a miss")
    if classes == 1:
        output.print("caution: all images are of one class, so that every neighbor is right: test on more classes")
    elif classes < MIN_CLASSES or images < MIN_IMAGES:
        output.print(
            f"caution: scores on {counted(images, 'image')} of {counted(classes, 'class')} say little; "
            f"one image is {100 / images:.1f} points"
        )


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: Sequence[int] = (0,)) -> None:
    """Print a table, aligned to the right except for the columns `left`."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number in left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    output.print(table)


class Progress(Protocol):
    """Reports progress: the activity, how much is done, of how much (0: print the note), and a note."""

    def __call__(self, what: str, done: int, total: int, note: str) -> None: ...


def no_progress(what: str, done: int, total: int, note: str) -> None:
    """Shows nothing."""


def counter(progress: Progress, what: str) -> Callable[[int, int], None]:
    """A function of (done, total) that reports the progress of one activity."""
    return lambda done, total: progress(what, done, total, "")


@contextmanager
def show_progress() -> Iterator[Progress]:
    """A callback that shows progress bars with the time left, on a terminal or in a notebook with ipywidgets."""
    # On a narrow terminal, the note is cut first.
    elapsed, left = (Column(no_wrap=True, min_width=len("0:00:00")) for _ in range(2))
    bars = Bars(
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=12),
        TimeElapsedColumn(table_column=elapsed),
        TextColumn("left"),
        TimeRemainingColumn(table_column=left),
        TextColumn("{task.fields[note]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        console=messages,
        disable=not (messages.is_terminal or (messages.is_jupyter and find_spec("ipywidgets"))),
    )
    tasks: dict[str, TaskID] = {}

    def report(what: str, done: int, total: int, note: str) -> None:
        what, note = in_one_line(what), in_one_line(note)
        if total == 0:
            messages.print(f"{what}: {note}")
            return
        if what not in tasks:
            for task in bars.tasks:
                bars.update(task.id, visible=task.fields["keep"])
            tasks[what] = bars.add_task(what, total=total, note=note, keep=what == "training")
        bars.update(tasks[what], completed=done, total=total if total > 1 else None, note=note, visible=True)
        if done >= total and what != "training":
            bars.remove_task(tasks.pop(what))

    with bars:
        yield report


@contextmanager
def shown(progress: bool | Progress) -> Iterator[Progress]:
    """The callback for a caller's choice: True shows bars, False nothing, or the caller's own."""
    if callable(progress):
        yield progress
    elif progress:
        with show_progress() as report:
            yield report
    else:
        yield no_progress
