"""Runs an experiment's recipes, several at a time, and yields each result as soon as it is known."""

import shutil
import time
from collections.abc import Generator, Mapping
from pathlib import Path

from proxygml.display import Progress
from proxygml.paper.executors import Executor, Measure
from proxygml.paper.results import without_paths
from proxygml.training import build
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run, provenance


def finished(
    recipes: Mapping[str, Recipe],
    measure: Measure,
    *,
    work: Path,
    executor: Executor,
    progress: Progress,
    activity: str = "training",
    alone: bool = False,
) -> Generator[tuple[str, dict], None, None]:
    """The result of `measure(recipe, work / name)` for each recipe, by name, as soon as it is known.

    `alone` gives each a new process. To close the generator ends them.
    """
    recipes = {name: executor.run_recipe(recipe) for name, recipe in recipes.items()}
    for data, recipe in {recipe.data: recipe for recipe in recipes.values()}.items():
        if data is not None:
            build.load_images(recipe)  # data that no run can read is reported once, before the first run
    made_by = provenance() | executor.to_json()
    made_by["command"] = without_paths(str(made_by["command"]))
    total, epochs_done = sum(recipe.epochs for recipe in recipes.values()), 0
    failed: list[str] = []
    with executor.start(measure, recipes, work, alone=alone) as (tasks, lost):
        waiting = dict(tasks)
        while waiting:
            time.sleep(0.2)
            for name in [name for name, task in waiting.items() if task.done()]:
                recipe = recipes[name]
                epochs_done += recipe.epochs
                try:
                    outcome = waiting.pop(name).result()
                except lost as error:
                    *_, last_line = str(error).strip().split("\n")  # the message may be a traceback
                    outcome = {"failed": f"it ended without a result ({last_line})"}
                if "failed" in outcome:  # the other runs continue
                    failed.append(f"{recipe.loss} with seed {recipe.seed}: {outcome['failed']}")
                    continue
                on = {"machine": outcome.pop("machine")}
                yield name, outcome | {"made_by": made_by | on}
                shutil.rmtree(work / name, ignore_errors=True)
            under_way = sum(len(Run(work / name).log) for name in waiting)
            ended = f"{len(recipes) - len(waiting)} of {len(recipes)} runs"
            progress(activity, epochs_done + under_way, total, ended)
    if failed:
        raise ValueError(f"{len(failed)} of {len(recipes)} runs failed, first {failed[0]}")
