"""Reads the arguments of the command line; a mistake is one line that names the nearest command or option."""

import functools
import inspect
import io
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Union

import tyro

from proxygml.display import messages
from proxygml.distributed.launch import is_first_process
from proxygml.files import did_you_mean

Commands = Mapping[str, Callable[..., None]]


def subcommands(commands: Commands) -> Any:
    """A type by which tyro reads one of these commands and its options, and returns it without running it."""

    def subcommand(name: str, command: Callable[..., None]) -> Any:
        @functools.wraps(command)
        def bind(*given: object, **options: object) -> Callable[[], None]:
            return functools.partial(command, *given, **options)

        signature = inspect.signature(command)
        silent = tyro.conf.arg(help_behavior_hint="")  # the help says what happens without the option
        bind.__annotations__ = {
            each.name: Annotated[each.annotation, silent] if each.default in (None, ()) else each.annotation
            for each in signature.parameters.values()
        }
        bind.__signature__ = signature  # type: ignore[attr-defined]
        del bind.__wrapped__  # tyro would read its annotations
        return Annotated[Any, tyro.conf.subcommand(name, constructor=bind)]

    return Union[tuple(subcommand(*each) for each in commands.items())]  # noqa: UP007


def parse(commands: Commands, arguments: Sequence[str], description: str) -> Callable[[], None]:
    """The command with its options, ready to be called; a mistake ends the program with exit code 2."""
    box = io.StringIO()  # tyro draws its errors in boxes
    try:
        with redirect_stderr(box):
            command, unknown = _read(commands, arguments, description)
        if not unknown:
            return command
    except SystemExit as stop:
        if not stop.code:
            raise
        unknown = []
    words = list(takewhile(lambda word: not word.startswith("-") and word not in unknown[:1], arguments))
    help_text = io.StringIO()
    with redirect_stdout(help_text), redirect_stderr(io.StringIO()), suppress(SystemExit):
        _read(commands, [*words, "--help"], description)
    mistake = _describe(unknown[0], help_text.getvalue()) if unknown else _without_box(box.getvalue())
    if choices := re.match(r"Expected one of \{(.*)\}", mistake):  # a command is missing
        known = choices[1].split(", ")
        given = next((word for word in words if word not in commands), "")
        mistake = f"expected one of {', '.join(known)}" + (
            f", got {given!r}{did_you_mean(given, known)}" if given else ""
        )
        words = words[: words.index(given)] if given else words
    if is_first_process():
        words = [word for word in words if word != "run"]  # which stands for the run of --resume
        messages.print(f"error: {mistake} ({' '.join(['proxygml', *words])} --help)", style="red")
    sys.exit(2)


def _read(commands: Commands, arguments: Sequence[str], description: str) -> tuple[Callable[[], None], list[str]]:
    """The command with its options, and the arguments that are none of them."""
    return tyro.cli(
        subcommands(commands),
        prog="proxygml",
        description=description,
        args=arguments,
        return_unknown_args=True,
        config=(tyro.conf.CascadeSubcommandArgs, tyro.conf.OmitArgPrefixes),
    )


def _describe(word: str, help_text: str) -> str:
    """What is wrong with an argument, for a command with this help."""
    options = list(dict.fromkeys(re.findall(r"(?<![\w-])--[a-z][a-z-]*", help_text)))
    if word.startswith("--"):
        return f"no option {word}{did_you_mean(word.split('=')[0], options)}"
    choices = re.search(r"\{([\w,-]+)\}\]?$", help_text.splitlines()[0])
    if choices and not Path(word).exists():
        return (
            f"expected one of {choices[1].replace(',', ', ')}, got {word!r}{did_you_mean(word, choices[1].split(','))}"
        )
    option = next((each for each in ("--image", "--data") if each in options), None)
    return f"unexpected {word!r}" + (f": did you mean {option} {word}?" if option else "")


def _without_box(text: str) -> str:
    """The message in a box of tyro, which starts with a title, as one line without colors and help (indented by 8)."""
    lines = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()[1:]
    lines = [line.strip("│╰╯ ") for line in lines if not re.match(". {9}", line)]
    message = " ".join(line for line in lines if line.strip("─-"))
    message = re.split(r" (?:Argument helptext|For full helptext)", message)[0]
    message = re.sub(
        r"no type matching (.*?) could be instantiated from \[(.*?)\]\..*", r"expected \1, got \2", message
    )
    return re.sub(r"Error parsing __tyro\S+: ", "", message)
