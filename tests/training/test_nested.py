"""Runs with nested embeddings: settings, scores of every width, resuming."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.preprocessing import normalize

from proxygml.evaluation import evaluate
from proxygml.model import Model
from proxygml.training.build import load_images
from proxygml.training.recipe import Recipe
from proxygml.training.start import resume, train
from proxygml.training.summary import score_rows
from tests.training.test_training import PlugPulledError, same_weights, stop_at


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"nested": (512,)}, "expected nested as ascending dimensions from 1 to below embedding_dim 512, got 512"),
        ({"nested": (64, 64)}, "got 64 64"),
        ({"nested": (64,), "loss": "ms"}, "nested needs loss proxygml without shard, sparse_gradient"),
        ({"nested": (64,), "shard": True}, "nested needs loss proxygml without shard"),
        ({"nested": (64,), "sparse_gradient": True, "proxy_weight": 0.0}, "without shard, sparse_gradient"),
        ({"nested": (64,), "loss_settings": ("implementation=fused",)}, "and loss_settings"),
        ({"nested": (64,), "epochs": 0, "head_start": "fitted", "weights": "pretrained"}, "epochs of at least 1"),
    ],
)
def test_invalid_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe().changed(settings)


@pytest.mark.slow
def test_every_width_is_scored_and_a_stopped_run_goes_on(tiny: Recipe, tmp_path: Path) -> None:
    more = {"nested": (4, 16), "embedding_dim": 32, "proxy_start": "samples", "start_ratio": 1.0}
    recipe = tiny.changed(more)
    undisturbed = train(recipe, tmp_path / "undisturbed")
    with pytest.raises(PlugPulledError):
        train(recipe, tmp_path / "stopped", progress=stop_at(6))
    run = resume(tmp_path / "stopped")
    same_weights(run.folder / "last.pt", undisturbed.folder / "last.pt")
    assert run.scores["nested"] == undisturbed.scores["nested"]

    embeddings = Model(run).embed(load_images(recipe)[1])
    for width in (4, 16):
        scores = evaluate(normalize(embeddings.vectors[:, :width]), embeddings.labels, cluster=False).to_json()
        found = run.scores["nested"][str(width)]
        assert {name: found[name] for name in ("recall@1", "map_at_r")} == pytest.approx(
            {name: scores[name] for name in ("recall@1", "map_at_r")}
        )
    rows, _ = score_rows(recipe, run.scores)
    assert list(rows)[:3] == ["trained with proxygml", "first 4 of 32 dimensions", "first 16 of 32 dimensions"]
    assert {"sample_loss", "proxy_loss"} <= run.log[-1].keys()
    assert np.isfinite(run.log[-1]["loss"])
