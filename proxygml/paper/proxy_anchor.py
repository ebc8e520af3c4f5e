"""ProxyGML beside Proxy-Anchor, in small and large batches, with and without Proxy-Anchor's three skills."""

from proxygml.paper.comparison import alike
from proxygml.paper.drawing import draw_recall
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import Claims, Results
from proxygml.paper.tables import Table
from proxygml.training.recipe import Recipe

SKILLS = {"pooling": "average+max", "warmup": (0,), "optimizer": "adamw"}
ROWS = {  # loss, batch, skills; Recall@1 of the paper on CUB, Cars196, SOP
    "ProxyGML, 32": ("proxygml", 32, False, "66.6 85.5 78.0"),
    "Proxy-Anchor, 32": ("proxy-anchor", 32, False, "35.8 20.3 41.4"),
    "Proxy-Anchor with skills, 32": ("proxy-anchor", 32, True, "65.4 83.1 75.7"),
    "Proxy-Anchor, 180": ("proxy-anchor", 180, False, "66.1 84.2 54.5"),
    "Proxy-Anchor with skills, 180": ("proxy-anchor", 180, True, "- - -"),
    "ProxyGML with skills, 32": ("proxygml", 32, True, "- - -"),
    "ProxyGML with skills, 180": ("proxygml", 180, True, "- - -"),
}
QUOTED = ("Proxy-Anchor with skills, 30, from its own paper", "-", "-", "65.9", "84.6", "76.0")


def rows(base: Recipe) -> dict[str, Recipe]:
    return {
        name: alike(base, loss).changed({"batch_size": batch, **(SKILLS if skills else {})})
        for name, (loss, batch, skills, _) in ROWS.items()
    }


def table(results: Results, dataset: str) -> Table:
    rows = [(name, *results.cells(name, "recall@1", "nmi"), *ROWS[name][3].split()) for name in results.rows]
    columns = ("method, batch", "R@1", "NMI", "paper: CUB R@1", "paper: Cars196 R@1", "paper: SOP R@1")
    return Table(columns, (*rows, QUOTED))


def claims(results: Results, dataset: str) -> Claims:
    others = [name for name, (loss, *_, figures) in ROWS.items() if loss == "proxy-anchor" and figures != "- - -"]
    return {f"ProxyGML, 32, is better than {name}": results.verdicts("ProxyGML, 32", name) for name in others}


EXPERIMENT = Experiment(rows=rows, table=table, draw=draw_recall, claims=claims)
