"""The runs of an experiment, several at a time, and what each found as soon as it is known."""

import shutil
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path

from proxygml.paper.executors import Executor, Measure
from proxygml.training import build
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run, provenance


def finished(
    recipes: Mapping[str, Recipe],
    measure: Measure,
    *,
    work: Path,
    executor: Executor,
    progress: Callable[[int, str], None],
    alone: bool = False,
) -> Generator[tuple[str, dict], None, None]:
    """What `measure(recipe, work / name)` gave for each recipe, by name, as soon as it is known.

    `alone` gives each a new process. To close the generator ends them.
    """
    for data, recipe in {recipe.data: recipe for recipe in recipes.values()}.items():
        if data is not None:
            build.load_images(recipe)  # what no run could read is said once, before any begins
    made_by = provenance() | executor.to_json()
    epochs_done = 0
    failed: list[str] = []
    with executor.start(measure, recipes, work, alone=alone) as (tasks, lost):
        waiting = dict(tasks)
        while waiting:
            time.sleep(0.2)
            for name in [name for name, task in waiting.items() if task.done()]:
                recipe = recipes[name]
                epochs_done += recipe.epochs
                try:
                    found = waiting.pop(name).result()
                except lost as error:
                    *_, last_line = str(error).strip().split("\n")  # of what may be a traceback from elsewhere
                    found = {"failed": f"it ended without a result ({last_line})"}
                if "failed" in found:  # the others shall not wait for it to be mended
                    failed.append(f"{recipe.loss} with seed {recipe.seed}: {found['failed']}")
                    continue
                on = {"machine": found.pop("machine")}
                yield name, found | {"made_by": made_by | on}
                shutil.rmtree(work / name, ignore_errors=True)
            under_way = sum(len(Run(work / name).log) for name in waiting)
            progress(epochs_done + under_way, f"{len(recipes) - len(waiting)} of {len(recipes)} runs")
    if failed:
        raise ValueError(f"{len(failed)} of {len(recipes)} runs failed, first {failed[0]}")
