"""Named recipes to start from."""

from proxygml.training.recipe import Recipe

GLYPHS = Recipe(
    dataset="glyphs",
    image_size=32,
    crop_scale=(0.6, 1.0),
    flip=False,
    test_crop=1.0,
    embedding_dim=128,
    proxies_per_class=4,
    epochs=12,
    learning_rate=2e-3,
    proxy_learning_rate=None,
    adam_epsilon=1e-8,
    schedule="cosine",
)

PHOTOS_FAST = Recipe(  # chosen on held-out classes of CUB-200-2011 and Cars196: docs/photos.md
    dataset="folder",
    image_size=224,
    test_scale=9 / 7,  # 288 pixels
    crop_scale=(0.16, 1.0),
    backbone="efficientnet-lite0",
    weights="pretrained",
    pooling="average+max",
    head_start="fitted",
    ratio=1.0,
    epochs=0,
    held_out=0.0,
)
PHOTOS = PHOTOS_FAST.changed(
    {
        "held_out": 0.1,
        "proxy_start": "samples",
        "epochs": 5,
        "learning_rate": 5e-4,
        "head_learning_rate": 1e-3,
        "schedule": "cosine",
        "freeze_batch_norm": True,
        "keep_epoch": "last",
        "cache": "runs/cache",
    }
)
PHOTOS_BEST = PHOTOS.changed({"backbone": "efficientnet-lite2", "epochs": 8})

PAPER = Recipe(  # from the paper's text, otherwise from its authors' code: docs/paper.md
    backbone="bn-inception",
    weights="pretrained",
    decay=(19, 39),
    warmup=(1,),
    freeze_batch_norm=True,
    held_out=0.0,
    tested_epochs=(1, 2, *range(35, 51)),
    workers=4,
)

PRESETS: dict[str, tuple[str, Recipe]] = {
    "glyphs": ("Letters in sixteen typefaces: minutes on a CPU, nothing to download.", GLYPHS),
    "photos-fast": (
        "A head on a frozen pretrained network, for your own photos in one folder per class: --data FOLDER.",
        PHOTOS_FAST,
    ),
    "photos": (
        "The head, then the whole network, for your own photos; 25 minutes of one core for 6,000: --data FOLDER.",
        PHOTOS,
    ),
    "photos-best": (
        "A larger network and more epochs; not measured yet: --data FOLDER.",
        PHOTOS_BEST,
    ),
    "resnet50": (
        "The settings of `paper-cub` with the field's usual network, ResNet-50, for a GPU: --data ROOT.",
        PAPER.changed({"dataset": "cub", "backbone": "resnet50"}),
    ),
    "paper-cub": ("The paper's run on CUB-200-2011, for a GPU: --data ROOT.", PAPER.changed({"dataset": "cub"})),
    "paper-cars": ("The paper's run on Cars196, for a GPU: --data ROOT.", PAPER.changed({"dataset": "cars"})),
    "paper-sop": (
        "The paper's run on Stanford Online Products, for a GPU: --data ROOT.",
        PAPER.changed(
            {
                "dataset": "sop",
                "proxies_per_class": 1,
                "proxy_weight": 0.0,
                "proxy_learning_rate": 0.3,
                "freeze_batch_norm": False,
                "recall_at": (1, 10, 100, 1000),
            }
        ),
    ),
}
