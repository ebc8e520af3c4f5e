"""How well an embedding retrieves and clusters unseen classes, and its exact neighbors."""

from proxygml.evaluation.clustering import nmi
from proxygml.evaluation.scores import Scores, evaluate
from proxygml.evaluation.search import neighbors

__all__ = ["Scores", "evaluate", "neighbors", "nmi"]
