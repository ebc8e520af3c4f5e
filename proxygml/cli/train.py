"""proxygml train."""

import itertools
import shlex
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Literal, get_type_hints

import tyro

from proxygml.cli.display import program, show_run
from proxygml.cli.objects import import_object
from proxygml.cli.stopping import resume_hint
from proxygml.display import messages, output, show_progress
from proxygml.distributed.launch import is_first_process
from proxygml.paper import methods
from proxygml.training.presets import GLYPHS, PRESETS
from proxygml.training.recipe import (
    DataSettings,
    EvaluationSettings,
    HardwareSettings,
    LossSettings,
    NetworkSettings,
    OptimizationSettings,
    Recipe,
    is_class_name,
)


@dataclass(frozen=True)
class Settings:
    """A Recipe in groups, as `--help` shows them."""

    data: DataSettings
    network: NetworkSettings
    loss: LossSettings
    optimization: OptimizationSettings
    evaluation: EvaluationSettings
    hardware: HardwareSettings

    @classmethod
    def of(cls, recipe: Recipe) -> "Settings":
        """The groups of a recipe."""
        kinds = get_type_hints(cls).values()
        return cls(*(kind(**{each.name: getattr(recipe, each.name) for each in fields(kind)}) for kind in kinds))

    @property
    def recipe(self) -> Recipe:
        """The recipe of these groups."""
        return Recipe(**{name: value for group in vars(self).values() for name, value in vars(group).items()})


def train(
    settings: Settings = Settings.of(GLYPHS),  # noqa: B008
    out: Path | None = None,
    resume: Path | None = None,
    like: Literal["fair", "native"] | None = None,
    minutes: float | None = None,
    log: tuple[Literal["tensorboard", "csv"], ...] = (),
    json: bool = False,
) -> None:
    """Train a network and evaluate it on classes not seen in training.

    `proxygml train glyphs` trains on drawn letters in a few minutes. Every setting of a preset is an option:
    `proxygml train glyphs --epochs 4 --embedding-dim 64`. The run is a folder with recipe, log, checkpoints, scores
    and pictures. After Ctrl-C, a crash or a full disk, `proxygml train --resume FOLDER` continues after the last
    finished epoch.

    Args:
        out: Folder of the new run (default: runs/DATASET-DATE-TIME).
        resume: Folder of a run to continue; the settings given with it replace its own: `--epochs 20`, `--device cpu`,
            `--data` if its images have moved. Settings that would make it another run are refused.
        like: Run the --loss with ProxyGML's settings (fair) or with those of its own paper or code (native); other
            options override them.
        minutes: Choose the size of training images and the number of epochs so that a run of a preset for photos takes
            at most this long on this machine.
        log: Also write scores and pictures for TensorBoard, or the scores of every epoch to metrics.csv.
        json: Print the scores as JSON.
    """
    recipe = settings.recipe
    if resume is not None and (out is not None or like is not None or minutes is not None):
        raise ValueError("--resume continues a run in its own folder: leave out --out, --like and --minutes")

    from proxygml.training import start
    from proxygml.training.loggers import make_logger

    data = import_object(recipe.dataset) if is_class_name(recipe.dataset) else None
    loss = import_object(recipe.loss) if is_class_name(recipe.loss) else None
    name = recipe.dataset.replace(":", ".")
    folder = resume or out or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    loggers = [make_logger(each, folder) for each in log]

    def hint() -> str:
        started = (folder / "recipe.json").exists()
        return f"continue with: {program()} train --resume {shlex.quote(str(folder))}" if started else ""

    with resume_hint(hint), show_progress() as progress:
        if resume is not None:
            run = start.resume(folder, recipe, data=data, loss=loss, loggers=loggers, progress=progress)
        else:
            if like == "native" and recipe.loss in methods.UNKNOWN:
                messages.print(f"native {recipe.loss}: {methods.UNKNOWN[recipe.loss]}")
            run = start.train(recipe, folder, data=data, loss=loss, loggers=loggers, minutes=minutes, progress=progress)
    if not is_first_process():
        return
    if json:
        output.print_json(data=run.scores)
    else:
        show_run(run.folder, run.recipe, run.scores)


def presets(arguments: list[str]) -> tuple[type, list[str]]:
    """A type that makes each preset a subcommand, and the arguments.

    --like changes the presets before other options do; --resume chooses the recipe of its run.
    """
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
    if arguments[:1] == ["train"] and "--resume" in given:
        from proxygml.training.parts import Parts  # slow to import
        from proxygml.training.run import Run

        if chosen := next((name for name in arguments if name in recipes and name != given["--resume"]), None):
            raise ValueError(f"--resume continues with the settings of the run: leave out {chosen}")
        recipe = recipes["run"] = Run.open(given["--resume"]).recipe
        typed = {"data": "--dataset", "loss": "--loss"}  # only what is typed is imported
        Parts().require(recipe, "network", *(part for part, option in typed.items() if option not in given))
        arguments = ["train", "run", *arguments[1:]]
    descriptions = {name: PRESETS[name][0] if name in PRESETS else "The run to resume." for name in recipes}
    settings = {name: Settings.of(recipe) for name, recipe in recipes.items()}
    return tyro.extras.subcommand_type_from_defaults(settings, descriptions, prefix_names=False), arguments
