"""Every table and figure of the paper, by name: `proxygml paper NAME`.

An experiment is a module. Its docstring says what it shows and IN_THE_PAPER where; `arms(base)` gives the recipe of
each row or point, `table(found, dataset)` and `draw(found, figure)` what a reader sees, `claims(found, dataset)` what
the paper says of it and whether that holds here. One that measures something else than scores has `measure(recipe,
folder)`, and its runs are made one at a time; one that needs test scores after every epoch says EVERY_EPOCH, and one
that compares times says SECONDS; one whose claims are of pairs of rows, so that some rows are enough for some of them,
says PAIRS. SEEDS is how many seeds its rows want where that is not three. PAPER_ROWS are those that the queue makes,
where that is not all; VARIANTS those that the fair protocol leaves out, as it searches what they differ in.
"""

import importlib
from types import ModuleType

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
        raise ValueError(f"expected an experiment among {', '.join(EXPERIMENTS)}, got {name!r}")
    return importlib.import_module(f"proxygml.paper.{EXPERIMENTS[name]}")
