"""Every table and figure of the paper, by name: `proxygml paper NAME`."""

import importlib
from typing import TYPE_CHECKING

from proxygml.files import unknown_name

if TYPE_CHECKING:
    from proxygml.paper.experiment import Experiment

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


def find(name: str) -> "Experiment":
    """The experiment of this name; an unknown name is an error that lists the known ones."""
    if name not in EXPERIMENTS:
        raise unknown_name("an experiment", name, EXPERIMENTS)
    return importlib.import_module(f"proxygml.paper.{EXPERIMENTS[name]}").EXPERIMENT
