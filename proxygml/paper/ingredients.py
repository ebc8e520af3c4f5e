"""What ingredients beyond the paper add to ProxyGML, one at a time and together, on held-out training classes."""

from collections.abc import Mapping

from proxygml.data.splits import MIN_HELD_OUT
from proxygml.paper.comparison import alike
from proxygml.paper.drawing import draw_recall
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import Results
from proxygml.paper.tables import Table
from proxygml.paper.tuning import HELD_OUT
from proxygml.training.recipe import Recipe

PAPER, OTHER = "proxygml", "proxy-anchor"
WIDE: dict[str, object] = {"start_ratio": 1.0}
SAMPLES: dict[str, object] = {"proxy_start": "samples"}
FITTED: dict[str, object] = {"head_start": "fitted"}
ROWS: dict[str, Mapping[str, object]] = {
    PAPER: {},
    "r = 0.1": {"ratio": 0.1},
    "r = 1": {"ratio": 1.0},
    "r from 1 to 0.05": WIDE,
    "proxies at samples": SAMPLES,
    "fitted head, proxies at samples": FITTED | SAMPLES,
    "mean of the links": {"plus": {"aggregate": "mean", "scale": 16.0, "margin": 0.1}},
    "softmax of the links": {"plus": {"aggregate": "softmax", "scale": 16.0, "margin": 0.1}},
    "anchors on the links": {"plus": {"anchor": True, "scale": 32.0, "margin": 0.1}, "proxy_learning_rate": 1e-2},
    "potential": {"plus": {"decay": 0.5, "radius": 0.2, "aggregate": "mean", "scale": 16.0}},
    "noise": {"plus": {"noise": 0.2}},
    "softmax, r from 1 to 0.05": WIDE | {"plus": {"aggregate": "softmax", "scale": 16.0, "margin": 0.1}},
    "anchors, r from 1 to 0.05": WIDE
    | {"plus": {"anchor": True, "scale": 32.0, "margin": 0.1}, "proxy_learning_rate": 1e-2},
    "softmax, fitted head, proxies at samples, r from 1 to 0.05": WIDE
    | SAMPLES
    | FITTED
    | {"plus": {"aggregate": "softmax", "scale": 16.0, "margin": 0.1}},
}


def rows(base: Recipe) -> dict[str, Recipe]:
    """Every row trained on three quarters of the training classes; test classes are not scored."""
    few = base.classes is not None and base.classes * HELD_OUT < MIN_HELD_OUT  # as in a quick check
    base = base.changed({"held_out": 0.5 if few else HELD_OUT, "tested_epochs": (), "test": False})
    ours = {
        name: _changed(alike(base, "proxygml"), settings)
        for name, settings in ROWS.items()
        if base.pretrained or "head_start" not in settings
    }
    return ours | {OTHER: alike(base, OTHER)}


def _changed(recipe: Recipe, settings: Mapping[str, object]) -> Recipe:
    """The recipe with settings; those under "plus" are of the loss proxygml-plus."""
    own = dict(settings)
    plus = own.pop("plus", {})
    assert isinstance(plus, dict)
    if plus:
        scale = plus.get("scale", recipe.scale)
        others = tuple(f"{name}={value}" for name, value in plus.items() if name != "scale")
        own |= {"loss": "proxygml-plus", "scale": scale, "loss_settings": others}
    return recipe.changed(own)


def table(results: Results, dataset: str) -> Table:
    """Scores on held-out classes, and the difference in Recall@1 to the paper's loss."""
    lines = []
    for row in results.rows:
        gain = "" if row == PAPER or PAPER not in results.rows else str(results.difference(row, PAPER, "recall@1"))
        lines.append((row, *results.cells(row, "recall@1", "map_at_r"), gain))
    return Table(("on held-out training classes", "R@1", "MAP@R", "R@1 above proxygml"), tuple(lines))


INGREDIENTS = Experiment(rows=rows, table=table, draw=draw_recall, height=5.5)
