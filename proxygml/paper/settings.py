"""The settings that experiments run in: the paper's three datasets, and smaller ones for machines without a GPU."""

from dataclasses import dataclass
from pathlib import Path

from proxygml.files import unknown_name
from proxygml.paper.frozen import PAPER
from proxygml.training.presets import GLYPHS, PRESETS
from proxygml.training.recipe import Recipe


@dataclass(frozen=True)
class Setting:
    """What all runs in a setting share, and how it differs from the paper."""

    recipe: Recipe
    about: str
    folder: str | None = None  # name of its data in the folder of datasets; None: it needs none
    minutes: float = 1.0  # estimated time of a run on one core, before the first run


SMALL_NETWORK = GLYPHS.changed({"classes": 100, "embedding_dim": 512, "proxies_per_class": 12, "epochs": 12})
# These do not build on presets: tuning a preset must not invalidate finished runs.
HEAD = Recipe(
    skip_broken=True,  # our copy of Cars196 lacks 15 photos
    held_out=0.0,
    baselines=False,
    crop_scale=(0.08, 1.0),
    crop_ratio=(3 / 4, 4 / 3),
    flip=True,
    test_crop=224 / 256,
    backbone="efficientnet-lite0",
    weights="pretrained",
).changed(PAPER)
SMALL = HEAD.changed(
    {
        "image_size": 112,
        "crop_scale": (0.16, 1.0),
        "feature_crops": 0,
        "epochs": 6,
        "learning_rate": 2e-4,
        "head_learning_rate": 1e-3,
        "schedule": "cosine",
        "freeze_batch_norm": True,
    }
)
ABOUT_HEAD = (
    "EfficientNet-Lite0 stays as pretrained; a linear head of 512 dimensions learns on its features of eight random "
    "crops per image, by the paper's full recipe (50 epochs). The last epoch is scored"
)
ABOUT_SMALL = (
    "pretrained EfficientNet-Lite0, trained as a whole at 112 pixels for 6 epochs with a cosine schedule. The last "
    "epoch is scored"
)
SOP_LIKE = SMALL_NETWORK.changed(
    {
        "dataset": "omniglot",
        "classes": None,
        "max_class_size": 5,
        "image_size": 28,
        "held_out": 0.0,
        "keep_epoch": "last",
        "baselines": False,
        "proxies_per_class": 1,
        "proxy_weight": 0.0,
        "proxy_learning_rate": 0.3,
        "adam_epsilon": 1e-2,
        "recall_at": (1, 10, 100),
        "epochs": 20,
        "learning_rate": 5e-3,  # best of 5e-4, 2e-3 and 5e-3 on held-out training classes
    }
)

SETTINGS = {
    "cars-head": Setting(
        HEAD.changed({"dataset": "cars", "image_size": 144}), f"Cars196 at 144 pixels: {ABOUT_HEAD}", "Cars196", 3
    ),
    "cub-head": Setting(
        HEAD.changed({"dataset": "cub", "image_size": 224}),
        f"CUB-200-2011 at 224 pixels: {ABOUT_HEAD}",
        "CUB_200_2011",
        2,
    ),
    "cars-small": Setting(SMALL.changed({"dataset": "cars"}), f"Cars196: {ABOUT_SMALL}", "Cars196", 13),
    "cub-small": Setting(SMALL.changed({"dataset": "cub"}), f"CUB-200-2011: {ABOUT_SMALL}", "CUB_200_2011", 10),
    "omniglot-sop": Setting(
        SOP_LIKE,
        "in place of Stanford Online Products, whose photos we do not have: all of Omniglot, 964 "
        "handwritten characters to train on and 659 others to test on, 5 drawings of each, 28 pixels, a small network "
        "from random weights, with the paper's settings for SOP (N = 1, no regularizer). The last epoch is scored",
        "omniglot28.npz",
        3,
    ),
    "glyphs": Setting(
        SMALL_NETWORK,
        "100 letters to train on and 100 others to test on, 32 pixels, a small network from random weights, 12 epochs",
    ),
    "omniglot": Setting(
        SMALL_NETWORK.changed({"dataset": "omniglot", "image_size": 28, "epochs": 8}),
        "100 handwritten characters to train on and 100 others to test on, 28 pixels, the same network, 8 epochs",
        "omniglot28.npz",
    ),
    "cub": Setting(PRESETS["paper-cub"][1], "the paper's own setting, for a GPU", "CUB_200_2011"),
    "cars": Setting(PRESETS["paper-cars"][1], "the paper's own setting, for a GPU", "Cars196"),
    "sop": Setting(PRESETS["paper-sop"][1], "the paper's own setting, for a GPU", "Stanford_Online_Products"),
}

QUICK = {"classes": 24, "epochs": 2, "embedding_dim": 24}  # a quick check


def find_setting(dataset: str) -> Setting:
    """The setting of this name; an unknown name is an error that lists the known ones."""
    if dataset not in SETTINGS:
        raise unknown_name("a dataset", dataset, SETTINGS)
    return SETTINGS[dataset]


def base_recipe(dataset: str, data: str | None, quick: bool) -> Recipe:
    """The recipe that every run in a setting starts from; `data` is the dataset's folder, or its parent folder."""
    setting = find_setting(dataset)
    if setting.folder is not None:
        if data is None:
            raise ValueError(f"{dataset} needs its folder: --data ROOT, see docs/datasets.md")
        inner = Path(data) / setting.folder
        data = str(inner) if inner.exists() else data
    return setting.recipe.changed({"data": data, **(QUICK if quick else {})})
