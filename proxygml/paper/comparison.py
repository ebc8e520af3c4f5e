"""ProxyGML beside every method that the paper compares it with, and beside Proxy-Anchor in other batches."""

from matplotlib.figure import Figure

from proxygml import losses
from proxygml.paper import methods
from proxygml.paper.drawing import draw_ranges, draw_recall, starred
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import METRICS, Claims, Results
from proxygml.paper.tables import Table
from proxygml.training.recipe import Recipe

OURS = ("proxygml, 64", "proxygml, 384", "proxygml")
VARIANTS: dict[str, dict[str, object]] = {  # the same loss with more links, at 512
    "proxygml, r = 1": {"ratio": 1.0},
    "proxygml, r from 1 to 0.05": {"ratio": 0.05, "start_ratio": 1.0},  # ours, not the paper's
}
QUOTED = {  # by the paper, mostly from other papers: dimension, then NMI, R@1, R@2, R@4 (SOP: R@1, R@10, R@100)
    "semihard": (64, "55.4 42.6 55.0 66.4", "53.4 51.5 63.8 73.5", "89.5 66.7 82.4 91.9"),
    "clustering": (64, "59.2 48.2 61.4 71.8", "59.0 58.1 70.6 80.3", "89.5 67.0 83.7 93.2"),
    "liftedstruct": (64, "56.6 43.6 56.6 68.6", "56.9 53.0 65.7 76.0", "88.7 62.5 80.8 91.9"),
    "proxy-nca": (64, "59.5 49.2 61.9 67.9", "64.9 73.2 82.4 86.4", "90.6 73.7 - -"),
    "hdc": (384, "- 53.6 65.7 77.0", "- 73.7 83.2 89.5", "- 69.5 84.4 92.8"),
    "htl": (512, "- 57.1 68.8 78.7", "- 81.4 88.0 92.7", "- 74.8 88.3 94.8"),
    "damlrrm": (512, "61.7 55.1 66.5 76.8", "64.2 73.5 82.6 89.1", "88.2 69.7 85.2 93.2"),
    "hdml": (512, "62.6 53.7 65.7 76.7", "69.7 79.1 87.1 92.1", "89.3 68.7 83.2 92.4"),
    "softtriple": (512, "69.3 65.4 76.4 84.5", "70.1 84.5 90.7 94.5", "92.0 78.3 90.3 95.9"),
    "ms": (512, "- 65.7 77.0 86.3", "- 84.1 90.4 94.0", "- 78.2 90.5 96.0"),
    "proxygml, 64": (64, "65.1 59.4 70.1 80.4", "67.9 78.9 87.5 91.9", "89.8 76.2 89.4 95.4"),
    "proxygml, 384": (384, "68.4 65.2 76.4 84.3", "70.9 84.5 90.4 94.5", "90.1 77.9 90.0 96.0"),
    "proxygml": (512, "69.8 66.6 77.6 86.4", "72.4 85.5 91.8 95.3", "90.2 78.0 90.6 96.2"),
}
PAPERS_DATASETS = ("cub", "cars", "sop")
COMPARABLE = dict.fromkeys(("sop", "omniglot-sop"), ("softtriple", "ms"))  # the paper claims no lead over these


def alike(base: Recipe, loss: str) -> Recipe:
    """A method in the shared setting, as `--like fair`; ProxyGML keeps the warm-up of its preset.

    Where the base leaves the rate of the proxies to the loss, it leaves it to every loss.
    """
    if loss == "proxygml":
        return base.changed({"loss": loss})
    return base.changed(methods.fair(loss, own_rate=base.proxy_learning_rate is None))


def every_method(base: Recipe) -> dict[str, Recipe]:
    """Every loss in the shared setting; no hdc with feature_crops, which do not run its early stages."""
    return {name: alike(base, name) for name in losses.METHODS if name != "hdc" or not base.feature_crops}


def rows(base: Recipe) -> dict[str, Recipe]:
    """Every loss at the dimension that the paper quotes for it, others at 512; ProxyGML at 64, 384 and 512."""
    recipes = {name: recipe for name, recipe in every_method(base).items() if name != "proxygml"}
    recipes |= dict.fromkeys(OURS, alike(base, "proxygml"))
    return {
        name: recipe.changed({"embedding_dim": max(3, dimension_of(name) * base.embedding_dim // 512)})
        for name, recipe in recipes.items()
    } | variants(base)


def variants(base: Recipe) -> dict[str, Recipe]:
    return {name: alike(base, "proxygml").changed(settings) for name, settings in VARIANTS.items()}


def dimension_of(name: str) -> int:
    """Dimension of the embeddings in the paper's row of a method; 512 if there is none."""
    return int(QUOTED[name][0]) if name in QUOTED else 512


def row_of_same_dimension(name: str) -> str:
    """The row of ProxyGML with the dimension of a method."""
    return next(ours for ours in OURS if dimension_of(ours) == dimension_of(name))


def table(results: Results, dataset: str) -> Table:
    """Our runs on the left, the paper's numbers on the right."""
    metrics = [metric for metric in next(iter(results.rows.values()))[0]["scores"] if metric.startswith("recall@")][:3]
    here = ["NMI", *(metric.replace("recall", "R") for metric in metrics)]
    if dataset in PAPERS_DATASETS:
        quoted = [f"quoted: {name}" for name in here]
    else:
        quoted = [f"quoted: {name} R@1" for name in ("CUB", "Cars196", "SOP")]
    rows = []
    for row in results.rows:
        dimension, *figures = QUOTED.get(row, ("-", *["- - - -"] * 3))
        columns = [str(figure).split() for figure in figures]
        theirs = columns[PAPERS_DATASETS.index(dataset)] if dataset in PAPERS_DATASETS else [one[1] for one in columns]
        rows.append((starred(row), *results.cells(row, "nmi", *metrics), *theirs, str(dimension)))
    return Table(("method", *here, *quoted, "quoted: D"), tuple(rows))


def draw(results: Results, figure: Figure) -> None:
    ranges = {starred(name): results.range(name, "recall@1") for name in results.rows}
    ordered = dict(sorted(ranges.items(), key=lambda pair: -pair[1].mean))
    draw_ranges(figure.subplots(), ordered, "Recall@1, %")


def claims(results: Results, dataset: str) -> Claims:
    others = [name for name in (*QUOTED, "proxy-anchor") if name not in OURS and name in results.rows]
    comparable = [name for name in COMPARABLE.get(dataset, ()) if name in others]
    better = {}
    for name in [name for name in others if name not in comparable]:
        claim = f"ProxyGML is better than {starred(name)} at {dimension_of(name)} dimensions"
        better[claim] = results.verdicts(row_of_same_dimension(name), name)
    return better | {
        f"ProxyGML is comparable to {starred(name)}": {
            column: f"difference {results.difference('proxygml', name, metric)}" for column, metric in METRICS.items()
        }
        for name in comparable
    }


COMPARISON = Experiment(
    rows=rows,
    table=table,
    draw=draw,
    claims=claims,
    partial_claims=True,
    paper_rows=(*QUOTED, *VARIANTS, "proxy-anchor"),  # of Table 2, of the supplement, and ours with more links
    variants=tuple(VARIANTS),
)


# Supplement, Table 2

SKILLS = {"pooling": "average+max", "warmup": (0,), "optimizer": "adamw"}
ANCHOR_ROWS = {  # loss, batch, skills; Recall@1 of the paper on CUB, Cars196, SOP
    "ProxyGML, 32": ("proxygml", 32, False, "66.6 85.5 78.0"),
    "Proxy-Anchor, 32": ("proxy-anchor", 32, False, "35.8 20.3 41.4"),
    "Proxy-Anchor with skills, 32": ("proxy-anchor", 32, True, "65.4 83.1 75.7"),
    "Proxy-Anchor, 180": ("proxy-anchor", 180, False, "66.1 84.2 54.5"),
    "Proxy-Anchor with skills, 180": ("proxy-anchor", 180, True, "- - -"),
    "ProxyGML with skills, 32": ("proxygml", 32, True, "- - -"),
    "ProxyGML with skills, 180": ("proxygml", 180, True, "- - -"),
}
ANCHOR_QUOTED = ("Proxy-Anchor with skills, 30, from its own paper", "-", "-", "65.9", "84.6", "76.0")


def anchor_rows(base: Recipe) -> dict[str, Recipe]:
    return {
        name: alike(base, loss).changed({"batch_size": batch, **(SKILLS if skills else {})})
        for name, (loss, batch, skills, _) in ANCHOR_ROWS.items()
    }


def anchor_table(results: Results, dataset: str) -> Table:
    rows = [(name, *results.cells(name, "recall@1", "nmi"), *ANCHOR_ROWS[name][3].split()) for name in results.rows]
    columns = ("method, batch", "R@1", "NMI", "paper: CUB R@1", "paper: Cars196 R@1", "paper: SOP R@1")
    return Table(columns, (*rows, ANCHOR_QUOTED))


def anchor_claims(results: Results, dataset: str) -> Claims:
    theirs = [name for name, (loss, *_) in ANCHOR_ROWS.items() if loss == "proxy-anchor"]
    others = [name for name in theirs if name != "Proxy-Anchor with skills, 180"]  # which the paper does not quote
    return {f"ProxyGML, 32, is better than {name}": results.verdicts("ProxyGML, 32", name) for name in others}


PROXY_ANCHOR = Experiment(rows=anchor_rows, table=anchor_table, draw=draw_recall, claims=anchor_claims)
