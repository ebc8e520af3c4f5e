"""A pretrained backbone as a run that nobody has trained: its pooled features, of unit length, are the embedding."""

import re
from pathlib import Path

from proxygml import backbones
from proxygml.files import cache_folder, locked
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run


def is_backbone(name: str | Path) -> bool:
    """Whether this is the name of a backbone, one of BACKBONES or hf:NAME_OR_FOLDER, and not an existing path."""
    return not Path(name).exists() and (str(name) in backbones.BACKBONES or str(name).startswith("hf:"))


def pretrained_run(backbone: str) -> Run:
    """A run with the published weights of a backbone, in the cache folder."""
    trunk = backbones.build_trunk(backbone)
    backbones.load_pretrained(trunk, "pretrained")
    recipe = Recipe(
        backbone=backbone, weights="pretrained", embedding_dim=trunk.channels, head="none", unit_length=True
    )
    model = backbones.Embedder(trunk, None)
    run = Run(cache_folder() / "pretrained" / re.sub(r"[^\w.-]", "_", backbone))
    with locked(run.folder):
        run.write_recipe(recipe)
        run.save_best({"model": model.state_dict(), "loss": {}, "epoch": 0, "class_names": []})
    return run
