"""proxygml train."""

import itertools
import shlex
from datetime import datetime
from pathlib import Path
from typing import Literal

import tyro

from proxygml.cli.display import messages, output, program, show_progress, show_run
from proxygml.cli.stopping import resume_hint
from proxygml.distributed.launch import is_first_process
from proxygml.paper import methods
from proxygml.training.presets import GLYPHS, PRESETS
from proxygml.training.recipe import Recipe


def train(
    recipe: Recipe = GLYPHS,
    out: Path | None = None,
    resume: Path | None = None,
    like: Literal["fair", "native"] | None = None,
    json: bool = False,
) -> None:
    """Train a network and evaluate it on classes not seen in training.

    `proxygml train glyphs` trains on drawn letters in a few minutes. Every setting of a preset is an option:
    `proxygml train glyphs --epochs 4 --embedding-dim 64`. The run is a folder with recipe, log, checkpoints, scores
    and pictures. After Ctrl-C, a crash or a full disk, `proxygml train --resume FOLDER` continues after the last
    finished epoch.

    Args:
        out: Folder of the new run [default: runs/DATASET-DATE-TIME].
        resume: Folder of a run to continue, with its own recipe.
        like: Run the --loss with ProxyGML's settings (fair) or with those of its own paper or code (native); other
            options override them.
        json: Print the scores as JSON.
    """
    if resume is not None and (out is not None or like is not None or recipe != GLYPHS):
        raise ValueError("--resume continues with the run's own recipe and folder: leave out every other setting")

    from proxygml.training import trainer

    folder = resume or out or Path("runs") / f"{recipe.dataset}-{datetime.now():%Y%m%d-%H%M%S}"

    def hint() -> str:
        started = (folder / "recipe.json").exists()
        return f"continue with: {program()} train --resume {shlex.quote(str(folder))}" if started else ""

    with resume_hint(hint), show_progress() as progress:
        if resume is not None:
            run = trainer.resume(folder, progress=progress)
        else:
            if like == "native" and recipe.loss in methods.UNKNOWN:
                messages.print(f"native {recipe.loss}: {methods.UNKNOWN[recipe.loss]}")
            run = trainer.train(recipe, folder, progress=progress)
    if not is_first_process():
        return
    if json:
        output.print_json(data=run.scores)
    else:
        show_run(run.folder, run.recipe, run.scores)


def presets(arguments: list[str]) -> type:
    """A type that makes each preset a subcommand; --like changes the presets before other options do."""
    words = [part for each in arguments for part in (each.split("=", 1) if each.startswith("--") else [each])]
    given = dict(itertools.pairwise(words))  # --loss ms, or --loss=ms
    recipes = {name: recipe for name, (_, recipe) in PRESETS.items()}
    if "--like" in given:
        if given["--like"] not in ("fair", "native"):
            raise ValueError(f"expected --like fair or --like native, got {given['--like']}")
        chosen = next((name for name in arguments if name in recipes), None)
        if chosen is None or (given["--like"] == "native" and not chosen.startswith("paper-")):
            target = "a preset of the paper" if given["--like"] == "native" else "a preset"
            raise ValueError(f"--like {given['--like']} changes {target}: proxygml train paper-cub --like ...")
        recipe = recipes[chosen]
        dataset = given.get("--dataset", recipe.dataset)
        recipes[chosen] = recipe.changed(methods.settings(given.get("--loss", recipe.loss), given["--like"], dataset))
    descriptions = {name: description for name, (description, _) in PRESETS.items()}
    return tyro.extras.subcommand_type_from_defaults(recipes, descriptions, prefix_names=False)
