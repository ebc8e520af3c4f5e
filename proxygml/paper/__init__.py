"""Every table and figure of the paper, by name: `proxygml paper NAME`.

An experiment is a module. Its docstring describes it, and IN_THE_PAPER names the table or figure. Functions:
- `rows(base)`: the recipe of each row or point
- `table(results, dataset)`, `draw(results, figure)`: table and figure
- `claims(results, dataset)`: the paper's claims, each with a verdict
- `measure(recipe, folder)`, optional: measures something other than scores, one run at a time

Optional constants: EVERY_EPOCH (test scores after every epoch), SECONDS (compares times), PAIRS (a claim needs only two
rows), SEEDS (default 3), PAPER_ROWS (rows of the queue; default all), VARIANTS (rows that the fair protocol leaves out,
because it searches the setting they differ in).
"""

import importlib
from types import ModuleType

from proxygml.files import unknown_name

EXPERIMENTS = {
    "modules": "modules",
    "comparison": "comparison",
    "convergence": "convergence",
    "proxies": "proxies",
    "ratio": "ratio",
    "grid": "grid",
    "lambda": "proxy_weight",
    "cost": "cost",
    "proxy-anchor": "proxy_anchor",
    "illustration": "illustration",
    "frozen": "frozen",
}


def find(name: str) -> ModuleType:
    """The module of an experiment; an unknown name is an error that lists the known ones."""
    if name not in EXPERIMENTS:
        raise unknown_name("an experiment", name, EXPERIMENTS)
    return importlib.import_module(f"proxygml.paper.{EXPERIMENTS[name]}")
