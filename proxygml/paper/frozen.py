"""The pretrained network without training, and with a head trained on its features by the paper's recipe."""

from proxygml.paper.drawing import draw_recall, scores_table
from proxygml.paper.experiment import Experiment
from proxygml.paper.results import Results
from proxygml.training.recipe import Recipe

HEAD, FROZEN = "head on frozen features", "frozen network"
PAPER = {  # the paper's full recipe for a head of 512 dimensions on features of a frozen network
    "keep_epoch": "last",
    "feature_crops": 8,
    "embedding_dim": 512,
    "pooling": "average",
    "proxies_per_class": 12,
    "ratio": 0.05,
    "proxy_weight": 0.3,
    "epochs": 50,
    "batch_size": 32,
    "optimizer": "adam",
    "adam_epsilon": 1e-2,
    "learning_rate": 1e-4,
    "head_learning_rate": None,
    "proxy_learning_rate": 3e-2,
    "weight_decay": 1e-4,
    "schedule": "steps",
    "decay": (19, 39),
    "decay_factor": 0.1,
    "freeze_batch_norm": False,
}


def rows(base: Recipe) -> dict[str, Recipe]:
    """One run, which scores both; none if the network has no pretrained weights."""
    return {HEAD: base.changed({**PAPER, "baselines": True})} if base.weights else {}


def references(runs: list[dict]) -> Results:
    """The frozen network as a separate row, before the head."""
    return Results.of([*({**run, "row": FROZEN, "scores": run["frozen"]} for run in runs), *runs], (FROZEN, HEAD))


FROZEN_NETWORK = Experiment(
    rows=rows,
    table=lambda results, dataset: scores_table(references(results.rows[HEAD]), "not trained, or only a head"),
    draw=lambda results, figure: draw_recall(references(results.rows[HEAD]), figure),
)
