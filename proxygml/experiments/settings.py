"""On what the paper's experiments are run: its own three datasets, and smaller ones for a machine without a GPU."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from proxygml.recipes import GLYPHS, PRESETS, Recipe


@dataclass(frozen=True)
class Setting:
    """What all runs on a dataset share, and how it stands to the paper."""

    recipe: Recipe
    about: str
    needs_data: bool = True
    first_stage: str | None = None  # trained: what comes before it is run once, and its maps are kept
    untrained: str | None = None  # a run in results/ that has the scores of the network as it comes


SMALL = GLYPHS.changed({"classes": 100, "embedding_dim": 512, "proxies_per_class": 12, "epochs": 12})

SETTINGS = {
    "glyphs": Setting(
        SMALL,
        "100 letters to train on and 100 others to test on, 32 pixels, a small network from random weights, 12 epochs",
        needs_data=False,
    ),
    "omniglot": Setting(
        SMALL.changed({"dataset": "omniglot", "image_size": 28, "epochs": 8}),
        "100 handwritten characters to train on and 100 others to test on, 28 pixels, the same network, 8 epochs",
    ),
    "cub-small": Setting(
        PRESETS["cub-small"][1].changed(
            {
                "ratio": 0.05,
                "pooling": "average",
                "image_size": 128,
                "test_crop": 1.0,
                "epochs": 3,
            }
        ),
        "CUB-200-2011 at 128 pixels, more quickly than the preset of that name: pretrained EfficientNet-Lite0, of "
        "which the last two stages are trained, without random crops, 3 epochs (hdc, which taps earlier stages too, is "
        "left out)",
        first_stage="7",
        untrained="cub-maps",
    ),
    "cub": Setting(PRESETS["paper-cub"][1], "the paper's own setting, for a GPU"),
    "cars": Setting(PRESETS["paper-cars"][1], "the paper's own setting, for a GPU"),
    "sop": Setting(PRESETS["paper-sop"][1], "the paper's own setting, for a GPU"),
}

MAPS = Path("runs/paper/maps")
QUICK = {"classes": 24, "epochs": 2, "embedding_dim": 24}  # does everything work?


def find_setting(dataset: str) -> Setting:
    """What runs on a dataset share; an unknown name is an error that lists the known ones."""
    if dataset not in SETTINGS:
        raise ValueError(f"expected a dataset among {', '.join(SETTINGS)}, got {dataset!r}")
    return SETTINGS[dataset]


def base_recipe(dataset: str, data: str | None, quick: bool) -> Recipe:
    """The recipe that every run on a dataset starts from."""
    setting = find_setting(dataset)
    if setting.needs_data and data is None:
        raise ValueError(f"{dataset} needs its folder: --data ROOT, see docs/datasets.md")
    recipe = setting.recipe.changed({"data": data, **(QUICK if quick else {})})
    if setting.first_stage is None:
        return recipe
    network = f"{recipe.backbone}:{setting.first_stage}"
    return recipe.changed({"dataset": "maps", "data": str(maps_folder(dataset, data)), "backbone": network})


def maps_folder(dataset: str, data: str | None) -> Path:
    """Where the maps of a dataset are kept; those of other images or of another network lie elsewhere."""
    setting = SETTINGS[dataset]
    recipe = setting.recipe
    made_of = (recipe.backbone, setting.first_stage, recipe.image_size, recipe.test_crop, str(data))
    return MAPS / f"{dataset}-{hashlib.sha256(repr(made_of).encode()).hexdigest()[:8]}"
