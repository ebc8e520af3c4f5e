"""Every table and figure of the paper, by name: `proxygml paper NAME`."""

import importlib
from typing import TYPE_CHECKING, NamedTuple

from proxygml.files import unknown_name

if TYPE_CHECKING:
    from proxygml.paper.experiment import Experiment


class Entry(NamedTuple):
    """An experiment as `proxygml paper` lists it, without importing it."""

    module: str  # of this package
    in_the_paper: str  # which table or figure
    title: str  # one sentence


EXPERIMENTS = {
    "modules": Entry(
        "modules", "Table 1",
        "Gains from the positive mask, the mask softmax and the regularizer on proxies, alone and together.",
    ),
    "comparison": Entry(
        "comparison", "Table 2",
        "ProxyGML beside every method that the paper compares it with, all in the same trainer.",
    ),
    "convergence": Entry(
        "convergence", "Figure 1",
        "How fast several methods learn: Recall@1 on the test classes over epochs and over training time.",
    ),
    "proxies": Entry(
        "proxies", "Figure 4",
        "How many proxies a class needs, with a few, half or all of them linked.",
    ),
    "ratio": Entry(
        "ratio", "Figure 5",
        "How many of the proxies each sample should be linked to, at N = 12.",
    ),
    "grid": Entry(
        "grid", "supplement, Figure 1",
        "Numbers of proxies and ratios of links, in all combinations.",
    ),
    "lambda": Entry(
        "proxy_weight", "supplement, Figure 2",
        "How much the weight of the regularizer on proxies, lambda, matters.",
    ),
    "cost": Entry(
        "cost", "supplement, Table 1",
        "Time and memory of a training step of each method relative to ProxyGML, measured one after another.",
    ),
    "proxy-anchor": Entry(
        "proxy_anchor", "supplement, Table 2",
        "ProxyGML beside Proxy-Anchor, in small and large batches, with and without Proxy-Anchor's three skills.",
    ),
    "illustration": Entry(
        "illustration", "Figures 2 and 3",
        "One sample, its linked proxies and the resulting class probabilities, before and after training.",
    ),
    "frozen": Entry(
        "frozen", "none; the lower bound for every other table",
        "The pretrained network without training, and with a head trained on its features by the paper's recipe.",
    ),
}  # fmt: skip


def find(name: str) -> "Experiment":
    """The experiment of this name; an unknown name is an error that lists the known ones."""
    if name not in EXPERIMENTS:
        raise unknown_name("an experiment", name, EXPERIMENTS)
    return importlib.import_module(f"proxygml.paper.{EXPERIMENTS[name].module}").EXPERIMENT
