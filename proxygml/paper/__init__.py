"""Every table and figure of the paper, by name: `proxygml paper NAME`."""

import importlib
from typing import TYPE_CHECKING, NamedTuple

from proxygml.files import unknown_name

if TYPE_CHECKING:
    from proxygml.paper.experiment import Experiment


class Entry(NamedTuple):
    """An experiment as `proxygml paper` lists it, without importing it."""

    definition: str  # module of this package, and name in it
    in_the_paper: str  # which table or figure
    title: str  # one sentence


EXPERIMENTS = {
    "modules": Entry(
        "ablations.MODULES", "Table 1",
        "Gains from the positive mask, the mask softmax and the regularizer on proxies, alone and together.",
    ),
    "comparison": Entry(
        "comparison.COMPARISON", "Table 2",
        "ProxyGML beside every method that the paper compares it with, all in the same trainer.",
    ),
    "convergence": Entry(
        "speed.CONVERGENCE", "Figure 1",
        "How fast several methods learn: Recall@1 on the test classes over epochs and over training time.",
    ),
    "proxies": Entry(
        "ablations.PROXIES", "Figure 4",
        "How many proxies a class needs, with a few, half or all of them linked.",
    ),
    "ratio": Entry(
        "ablations.RATIO", "Figure 5",
        "How many of the proxies each sample should be linked to, at N = 12.",
    ),
    "spread": Entry(
        "spread.SPREAD", "none; it explains Figure 5",
        "How samples and their links develop with r = 0.05, with r = 1, and with r from 1 to 0.05.",
    ),
    "grid": Entry(
        "ablations.GRID", "supplement, Figure 1",
        "Numbers of proxies and ratios of links, in all combinations.",
    ),
    "lambda": Entry(
        "ablations.LAMBDA", "supplement, Figure 2",
        "How much the weight of the regularizer on proxies, lambda, matters.",
    ),
    "cost": Entry(
        "speed.COST", "supplement, Table 1",
        "Time and memory of a training step of each method relative to ProxyGML, measured one after another.",
    ),
    "proxy-anchor": Entry(
        "comparison.PROXY_ANCHOR", "supplement, Table 2",
        "ProxyGML beside Proxy-Anchor, in small and large batches, with and without Proxy-Anchor's three skills.",
    ),
    "illustration": Entry(
        "illustration.ILLUSTRATION", "Figures 2 and 3",
        "One sample, its linked proxies and the resulting class probabilities, before and after training.",
    ),
    "ingredients": Entry(
        "ingredients.INGREDIENTS", "none; ahead of it",
        "What ingredients beyond the paper add, one at a time and together, on held-out training classes.",
    ),
    "frozen": Entry(
        "frozen.FROZEN_NETWORK", "none; the lower bound for every other table",
        "The pretrained network without training, and with a head trained on its features by the paper's recipe.",
    ),
}  # fmt: skip


def find(name: str) -> "Experiment":
    """The experiment of this name; an unknown name is an error that lists the known ones."""
    if name not in EXPERIMENTS:
        raise unknown_name("an experiment", name, EXPERIMENTS)
    module, _, definition = EXPERIMENTS[name].definition.partition(".")
    return getattr(importlib.import_module(f"proxygml.paper.{module}"), definition)
