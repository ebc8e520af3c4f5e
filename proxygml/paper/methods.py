"""Settings of each compared method: those of ProxyGML (fair), or those of its paper or released code (native).

Values are those of the released code where there is one; `UNKNOWN` says what is remembered, chosen by us or left out.
A run that its authors count in iterations has as many epochs as see the same number of images.
"""

TRAINING_IMAGES = {"cub": 5864, "cars": 8054, "sop": 59551}
ADAM = {"optimizer": "adam", "adam_epsilon": 1e-8}
SOFTMAX = ("norm-softmax", "cosface", "am-softmax", "arcface", "l-softmax", "subcenter-arcface", "center")

FAIR: dict[str, dict[str, object]] = {  # what differs from the paper's presets, which have an epsilon of 0.01
    "margin": {"proxy_learning_rate": 5e-4, "images_per_class": 4},
    "ms": {"images_per_class": 4},
    **{loss: {"proxy_learning_rate": 1e-2} for loss in ("softtriple", "proxy-anchor", "proxy-nca", *SOFTMAX)},
}

UNKNOWN = {
    "proxygml-plus": "ours, so there is no other setting than fair",
    "semihard": "the supplement's timed run; one random semi-hard triplet per anchor in the original, all of them here",
    "liftedstruct": "dropout 0.4 before the last layer is left out; crops vary in aspect instead of the whole image",
    "clustering": "gamma, its decay, optimizer and length are another implementation's: we did not have the paper's",
    "proxy-nca": "label smoothing of 0.1 and the narrow normal start of the last layer are left out",
    "hdc": "the last layers learn ten times as fast in the original; batches from super-classes of SOP are left out",
    "htl": "optimizer, rate and the large batch are from memory",
    "damlrrm": "a reconstruction: of the authors' setting we know only GoogLeNet and 512 dimensions",
    "hdml": "512 dimensions as in the table, 128 or 256 in the code's defaults; on SOP the values of Cars196 are used",
    "softtriple": "two centers a class on SOP are from memory",
    "margin": "its betas learn by Adam with the network, by SGD with momentum in the original",
    "proxy-anchor": "clipping of gradients at 10 and the dropped last batch are left out",
    "n-pair": "the weights of its regularizer are those of HDML's code; all else as fair",
    **dict.fromkeys(
        ("contrastive", "triplet", *SOFTMAX), "we know of no run on these datasets: its own constants, all else as fair"
    ),
}


def settings(loss: str, like: str, dataset: str) -> dict[str, object]:
    """Changes to a recipe for `dataset` that run `loss` "fair" or "native"."""
    if like == "fair":
        return fair(loss, own_rate=dataset not in TRAINING_IMAGES)
    if dataset not in TRAINING_IMAGES:
        raise ValueError(f"{loss} was run on {', '.join(TRAINING_IMAGES)}, not on {dataset}: use --like fair")
    known = native(dataset)
    if loss not in known:
        return fair(loss) | {"tested_epochs": ()}
    return {"loss": loss, "warmup": (), "tested_epochs": (), **known[loss]}


def fair(loss: str, *, own_rate: bool = False) -> dict[str, object]:
    """Changes to ProxyGML's recipe; `own_rate` leaves the rate of the proxies to the loss."""
    shared = {"loss": loss, "warmup": (), **FAIR.get(loss, {})}
    return shared | {"proxy_learning_rate": None} if own_rate else shared


def native(dataset: str) -> dict[str, dict[str, object]]:
    """Changes to the paper's preset for `dataset` that run each loss as its authors did."""
    cub, cars, sop = (dataset == name for name in TRAINING_IMAGES)

    def epochs(iterations: int, batch_size: int) -> int:
        """As many as see the images of these iterations."""
        return max(1, round(iterations * batch_size / TRAINING_IMAGES[dataset]))

    def random_crops(size: int) -> dict[str, object]:
        """Crops of `size` pixels from 256 x 256: there images were stretched, here the aspect ratio of crops varies."""
        area = (size / 256) ** 2
        return {"image_size": size, "crop_scale": (area, area), "test_crop": size / 256}

    ms_batch = 1000 if sop else 80
    return {
        "proxygml": {"warmup": (1,), "tested_epochs": (1, 2, *range(35, 51))},  # as the paper's presets
        "semihard": {
            **ADAM,
            "backbone": "googlenet",
            "batch_size": 112,
            "weight_decay": 4e-4,
            "epochs": 70,
            "decay": (30, 50),
            "decay_factor": 0.3,
        },
        "liftedstruct": {
            **random_crops(227),
            "backbone": "googlenet",
            "embedding_dim": 64,
            "batch_size": 128,
            "optimizer": "sgd",
            "weight_decay": 2e-4,
            "learning_rate": 1e-4,
            "head_learning_rate": 1e-3,
            "decay": (),
            "epochs": epochs(20_000, 128),
        },
        "clustering": {
            "embedding_dim": 64,
            "batch_size": 120,
            "optimizer": "rmsprop",
            "adam_epsilon": 1e-8,
            "learning_rate": 1e-4,
            "decay": (),
            "epochs": epochs(7_500, 120),
            # 0.94 fifteen times, every 500 iterations
            "loss_settings": (f"gamma_decay={0.94 ** (15 / epochs(7_500, 120)):.6f}",),
        },
        "proxy-nca": {
            "embedding_dim": 64,
            "image_size": 227,
            "adam_epsilon": 1.0,
            "weight_decay": 0.0,
            "learning_rate": 0.045,
            "proxy_learning_rate": 10.0 if sop else 1.0,
            "freeze_batch_norm": False,
            "epochs": 20 if cub else 50,
            "decay": tuple(range(1, 20 if cub else 50)),
            "decay_factor": 0.94,
            "loss_settings": (f"softmax_scale={8 if sop else 9}",),
        },
        "hdc": {
            **random_crops(224),
            "backbone": "googlenet",
            "embedding_dim": 384,
            "batch_size": 100,
            "images_per_class": 10,
            "optimizer": "sgd",
            "weight_decay": 2e-4,
            "learning_rate": 1e-4 if cub else 1e-2,
            "epochs": epochs(20_000 if cars else 60_000, 100),
            "flip": False,
            "decay": () if cub else (epochs(10_000, 100),) if cars else (34, 67),  # 20,000 and 40,000
            "decay_factor": 0.96 if sop else 0.1,
        },
        "htl": {"optimizer": "sgd", "learning_rate": 1e-3, "batch_size": 640, "images_per_class": 10},
        "damlrrm": {"backbone": "googlenet"},
        "hdml": {
            **random_crops(227),
            "backbone": "googlenet",
            "batch_size": 128,
            "adam_epsilon": 1e-8,
            "learning_rate": 6e-5 if cub else 7e-5,
            "weight_decay": 1e-3 if cub else 5e-3,
            "epochs": epochs(8_000, 128),
            "decay": (epochs(5_632, 128), epochs(6_848, 128)),
            "decay_factor": 0.5,
            "loss_settings": (f"regularization={0.015 if cub else 0.003}",),
        },
        "softtriple": {"proxy_learning_rate": 1e-2, "loss_settings": (f"centers_per_class={2 if sop else 10}",)},
        "ms": {
            **ADAM,
            "pooling": "max",
            "head_start": "kaiming",
            "image_size": 227,
            "crop_scale": (0.16, 1.0),
            "learning_rate": 3e-5,
            "weight_decay": 5e-4,
            "batch_size": ms_batch,
            "freeze_batch_norm": True,
            "epochs": epochs(3_000, ms_batch),
            "decay": (epochs(1_200, ms_batch), epochs(2_400, ms_batch)),
            "loss_settings": ("beta=40", "base=0.5"),
        },
        "margin": {
            **ADAM,
            "backbone": "resnet50",
            "embedding_dim": 128,
            "batch_size": 70,
            "learning_rate": 1e-6,
            "head_learning_rate": 1e-4,
            "proxy_learning_rate": 0.1,
            "epochs": epochs(4_000, 70),
            "decay": tuple(epochs(200 * epoch, 70) for epoch in (12, 14, 16, 18)),
            "decay_factor": 0.5,
        },
        "proxy-anchor": {
            "pooling": "average+max",
            "head_start": "kaiming",
            "optimizer": "adamw",
            "adam_epsilon": 1e-8,
            "warmup": (0,),
            "batch_size": 180,
            "freeze_batch_norm": not sop,
            "learning_rate": 6e-4 if sop else 1e-4,
            "proxy_learning_rate": 6e-2 if sop else 1e-2,
            "epochs": 60,
            "decay": tuple(range(10, 60, 10) if cub else range(20, 60, 20)),
            "decay_factor": 0.25 if sop else 0.5,
        },
        "n-pair": {"loss_settings": (f"regularization_weight={0.015 if cub else 0.003}",)},
    }
