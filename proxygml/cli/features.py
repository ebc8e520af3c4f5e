"""proxygml fit and proxygml transform."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from proxygml.cli.display import beside, show_next
from proxygml.cli.stopping import resume_hint
from proxygml.display import counted, output, show_scores

if TYPE_CHECKING:
    from proxygml.embeddings import Embeddings

Source = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NPZ|INDEX")]
SpaceFolder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SPACE")]


def fit(
    features: Source,
    *,
    out: Path,
    n_components: int | None = None,
    epochs: int = 40,
    held_out: float = 0.25,
    seed: int = 0,
    json: bool = False,
) -> None:
    """Fit a linear space on labeled feature vectors, without a network (docs/features.md).

    Args:
        features: An .npz with `vectors` (M, D) and `labels` (M,), as `proxygml embed` or your own program writes it, or
            an index.
        out: A new folder, which `proxygml transform` and `search --space` read.
        n_components: Dimension of the space (default: that of the features).
        epochs: Maximum number of epochs.
        held_out: Fraction of the classes that choose the settings and are scored.
        seed: Of the held-out classes, the proxies and the batches.
        json: Print the scores of the held-out classes as JSON.
    """
    from proxygml.features.estimator import ProxyGMLEmbedding
    from proxygml.retrieval.contents import check_new
    from proxygml.vectors import require_labels

    check_new(out)
    source = require_labels(_read(features), features)
    model = ProxyGMLEmbedding(n_components, epochs=epochs, held_out=held_out, random_state=seed, progress=True)
    with resume_hint(lambda: "the same command starts again"):
        model.fit(source.vectors, source.labels)
    model.set_params(progress=False).save(out, features_model=source.model)
    scores = {name: each.to_json() for name, each in model.held_out_scores_.items()}
    if json:
        output.print_json(data=scores)
        return
    if scores:
        show_scores(scores, heading="held-out classes, %", baseline="features")
    output.print(f"{out}: {counted(len(model.mean_), 'feature')} -> {counted(len(model.components_), 'dimension')}")
    vectors = beside(out, "vectors.npz")
    show_next((["transform", out, features, "--out", vectors], "the same vectors in the new space"))


def transform(space: SpaceFolder, features: Source, *, out: Path) -> None:
    """Write the vectors of a fitted space for feature vectors: an .npz to index, search, browse or evaluate.

    Args:
        space: The folder that `proxygml fit` wrote.
        features: An .npz with `vectors` (M, D), with or without labels, or an index.
        out: The .npz to write, with the same labels and paths.
    """
    from proxygml.vectors import transform as apply

    result = apply(space, _read(features))
    result.save(out)
    output.print(f"{counted(len(result), 'vector')} of {counted(result.dim, 'dimension')} in {out}")


def _read(features: str) -> "Embeddings":
    from proxygml.model import kind_of
    from proxygml.retrieval.validation import check_vectors
    from proxygml.vectors import open_vectors, read_all

    kind_of(features, ("embeddings", "index"))
    source = read_all(open_vectors(features))
    check_vectors(source.vectors, source.dim, features)  # scikit-learn's message is about its own models
    return source
