"""The command line: its commands, and how errors are printed."""

import os
import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import tyro

from proxygml.cli.audit import audit
from proxygml.cli.browse import browse
from proxygml.cli.classify import calibrate, classify
from proxygml.cli.cluster import cluster
from proxygml.cli.doctor import doctor
from proxygml.cli.embeddings import embed, evaluate
from proxygml.cli.export import export
from proxygml.cli.features import fit, transform
from proxygml.cli.index import index
from proxygml.cli.lists import datasets, losses
from proxygml.cli.paper import paper
from proxygml.cli.parsing import parse
from proxygml.cli.search import search
from proxygml.cli.serve import serve
from proxygml.cli.train import presets, train
from proxygml.display import messages, output
from proxygml.distributed.launch import is_first_process, should_report
from proxygml.version import __version__

COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "embed": embed,
    "evaluate": evaluate,
    "export": export,
    "fit": fit,
    "transform": transform,
    "index": index,
    "search": search,
    "classify": classify,
    "calibrate": calibrate,
    "cluster": cluster,
    "audit": audit,
    "browse": browse,
    "serve": serve,
    "datasets": datasets,
    "losses": losses,
    "paper": paper,
    "doctor": doctor,
}


def main(arguments: list[str] | None = None) -> None:
    """The command `proxygml`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not is_first_process() and arguments[:1] not in (["train"], ["embed"]):  # other commands need one process
        return
    if arguments == ["--version"]:
        output.print(f"proxygml {__version__}")
        return
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning  # type: ignore[assignment]  # called by position
            recipes, arguments = presets(arguments)
            train.__annotations__["settings"] = Annotated[recipes, tyro.conf.arg(name="")]
            parse(COMMANDS, arguments, "Deep metric learning with fewer proxies. Start with: proxygml train glyphs")()
            sys.stdout.flush()
    except BrokenPipeError:  # of `| head`
        output.on_broken_pipe()
    except KeyboardInterrupt as stop:
        # If it interrupted code in a string (as dataclasses run while they are imported), Python would end by SIGINT
        # whatever the exit code here; running another string clears that.
        exec("")  # nosec B102
        if is_first_process():
            messages.print(": ".join(("stopped", *map(str, stop.args))))
        sys.exit(130)
    except Exception as error:
        if os.environ.get("PROXYGML_TRACEBACK"):
            raise
        expected = isinstance(error, (ValueError, OSError, ModuleNotFoundError))
        what = str(error) if expected else f"{type(error).__name__}: {error} (PROXYGML_TRACEBACK=1 shows where)"
        if should_report(error):
            messages.print("error: " + " ".join(what.split()), style="red")
        sys.exit(1)


def _show_warning(message: Warning | str, *where: object) -> None:
    if is_first_process():
        messages.print(f"warning: {message}")
