"""What a recipe asks for: its device, images, network, loss and optimizer."""

import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import SLURMEnvironment
from lightning_fabric.strategies import DDPStrategy
from torch import nn

from proxygml import backbones, datasets, losses, sampling
from proxygml.backbones.cascade import CascadedEmbedder
from proxygml.backbones.trunk import Trunk
from proxygml.cache import Cache
from proxygml.datasets import ImageList
from proxygml.datasets.check import find_problems, without_problems
from proxygml.files import one_line
from proxygml.gathering import same_everywhere
from proxygml.images import Augmentation, Crops, FeatureCrops
from proxygml.launching import LostOthersError, start_copies
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.losses.proxygml.sharded import ShardedProxyGMLLoss, initial_proxies
from proxygml.optimizers import RowAdam
from proxygml.recipes import Recipe, parse_settings

Network = backbones.Embedder | CascadedEmbedder
MOST_CHECKED, SAMPLE = 100_000, 2_000  # images that are all decoded before training; of more, as many as this


def start_fabric(recipe: Recipe) -> Fabric:
    """Device, number format and processes that a recipe asks for, with its seed set.

    Processes are started here, with the same command, unless torchrun has started them.
    """
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", recipe.devices))
    nodes = int(os.environ["WORLD_SIZE"]) // devices if "LOCAL_WORLD_SIZE" in os.environ else recipe.nodes
    strategy: str | DDPStrategy = "auto"
    if devices * nodes > 1:
        logging.getLogger("lightning_fabric").setLevel(logging.WARNING)  # every process says that it is there
        if "LOCAL_RANK" not in os.environ and not SLURMEnvironment.detect():
            if nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"} <= os.environ.keys():
                raise ValueError("several nodes need MASTER_ADDR, MASTER_PORT, NODE_RANK, or torchrun: docs/scaling.md")
            start_copies(devices)
        warnings.filterwarnings("ignore", ".*`broadcast_buffers` is deprecated")  # its successor is too new
        # A warm-up leaves the trunk without gradients; statistics of batch normalisation are the same everywhere.
        strategy = DDPStrategy(
            find_unused_parameters=bool(recipe.warmup),
            broadcast_buffers=False,
            timeout=timedelta(seconds=min(recipe.timeout, 1e9)),  # years: timedelta has an end
        )
    try:
        fabric = Fabric(
            accelerator=recipe.device, devices=devices, num_nodes=nodes, precision=recipe.precision, strategy=strategy
        )
    except RuntimeError as error:
        raise ValueError(f"device {recipe.device} is not to be had here: use --device cpu or auto") from error
    try:
        fabric.launch()
        if fabric.world_size > 1:
            same_everywhere(asdict(recipe))
    except RuntimeError as error:
        if devices * nodes == 1:
            raise
        raise LostOthersError(
            f"not all of the {devices * nodes} processes came together: one has ended or hangs "
            f"({one_line(error, most=100)}). Give the command again"
        ) from error
    fabric.seed_everything(recipe.seed, verbose=False)
    return fabric


def load_images(recipe: Recipe) -> tuple[ImageList, ImageList]:
    """The training and the test images."""
    return datasets.load(
        recipe.dataset,
        recipe.data,
        size=recipe.image_size,
        classes=recipe.classes,
        max_class_size=recipe.max_class_size,
        test_share=recipe.test_share,
    )


def usable(
    images: ImageList,
    recipe: Recipe,
    cache: Cache | None,
    progress: Callable[[int, int], None],
    *,
    soon: bool = False,
) -> tuple[ImageList, int]:
    """The images that can be read, and how many cannot; those are an error unless the recipe skips them.

    Every pixel is decoded once, so that no file ends a run in its middle; with a cache that is when it is filled. With
    `soon`, of very many images only some are, drawn at random: a wrong folder or a damaged disk shows in them.
    """
    room = int(recipe.cache_gigabytes * 2**30)
    fits = cache is not None and cache.least_bytes(len(images)) <= room
    if soon and not fits and not recipe.skip_broken and len(images) > MOST_CHECKED:
        if cache is not None:
            remedy = "they are decoded in every epoch, raise cache_gigabytes"
            warnings.warn(
                f"{len(images):,} photos have no room in {recipe.cache_gigabytes:g} GB: {remedy}", stacklevel=2
            )
        some = images.only(np.sort(np.random.default_rng(0).permutation(len(images))[:SAMPLE]))
        without_problems(some, find_problems(some, decode=True, progress=progress), skip=False)
        return images, 0
    if cache is None:
        problems = find_problems(images, decode=True, progress=progress)
    else:
        problems = cache.fill(images, room, progress)
        images = replace(images, open_file=cache.open)
    return without_problems(images, problems, skip=recipe.skip_broken), len(problems)


def training_cache(recipe: Recipe) -> Cache | None:
    """Where training images are kept decoded, if anywhere; test images never are, so that no score depends on it."""
    if recipe.cache is None or recipe.dataset == "tar":  # whose images are no files of their own
        return None
    return Cache(Path(recipe.cache), side=2 * recipe.image_size)  # a crop of a quarter of the area loses nothing


def hold_out(images: ImageList, share: float) -> tuple[ImageList, ImageList | None]:
    """The images of most classes, to train on, and those of a share of the classes, to choose the best epoch on."""
    classes = len(images.class_names)
    if classes < 2:
        raise ValueError("expected at least two classes to train on, got one: add classes, or lower --test-share")
    count = round(share * classes)
    if count < 2:
        return images, None
    if classes - count < 2:
        raise ValueError(f"held_out {share} leaves {classes - count} of {classes} classes to train on: lower it")
    order = np.random.default_rng(0).permutation(classes)  # the same classes for every seed, so that seeds compare
    return images.of_classes(np.sort(order[count:])), images.of_classes(np.sort(order[:count]))


def training_crops(recipe: Recipe, images: ImageList, epoch: int) -> Crops | FeatureCrops:
    """Images as a network sees them in an epoch of training: random crops, or the features of such."""
    if images.features is not None:
        return FeatureCrops(images.features, images.labels, seed=recipe.seed, epoch=epoch)
    return random_crops(recipe, images, seed=recipe.seed, epoch=epoch)


def random_crops(recipe: Recipe, images: ImageList, *, seed: int, epoch: int) -> Crops:
    """Random crops as the recipe draws them."""
    augmentation, size = Augmentation(recipe.crop_scale, recipe.crop_ratio, recipe.flip), recipe.image_size
    drawn = {"seed": seed, "epoch": epoch}
    return Crops(images.open, images.labels, size=size, augmentation=augmentation, names=images.paths, **drawn)


def test_crops(recipe: Recipe, images: ImageList) -> Crops | FeatureCrops:
    """Images as a trained network sees them: center crops, or the features of these."""
    if images.features is not None:
        return FeatureCrops(images.features, images.labels)
    return center_crops(recipe, images)


def center_crops(recipe: Recipe, images: ImageList) -> Crops:
    return Crops(images.open, images.labels, size=recipe.image_size, test_crop=recipe.test_crop, names=images.paths)


def build_model(recipe: Recipe) -> Network:
    """The network that the recipe's loss needs, with random weights and with its frozen stages frozen."""
    method = losses.find(recipe.loss)
    if method.network == "three heads":
        model: Network = CascadedEmbedder(backbones.build_trunk(recipe.backbone), recipe.embedding_dim)
    else:
        model = backbones.build(
            recipe.backbone,
            embedding_dim=recipe.embedding_dim,
            pooling=recipe.pooling,
            normalise=method.unit_length,
            normalise_features=method.network == "batch-norm head",
        )
    if recipe.head_start == "kaiming":
        for layer in model.head.modules():
            if isinstance(layer, nn.Linear):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out")
                nn.init.zeros_(layer.bias)
    unknown = set(recipe.frozen) - set(model.trunk.stages)
    if unknown:
        raise ValueError(
            f"no stage {', '.join(sorted(unknown))} to freeze in {recipe.backbone}: "
            f"take some of {', '.join(model.trunk.stages)}, or none with --frozen alone"
        )
    if recipe.feature_crops:
        if not isinstance(model, backbones.Embedder):
            raise ValueError(f"{recipe.loss} taps stages of the network, which feature_crops does not run: set it to 0")
        model.trunk.requires_grad_(False)
    for name in recipe.frozen:
        for module in model.trunk.modules_of(name):
            module.requires_grad_(False)
    return model


def without_head(model: nn.Module, recipe: Recipe) -> nn.Module:
    """The same trunk with nothing after its pooling: what a network gives before its head has learned anything."""
    bare = backbones.Embedder(cast(Trunk, model.trunk), recipe.embedding_dim, pooling=recipe.pooling)
    bare.head = nn.Identity()
    return bare


def load_pretrained(model: Network, recipe: Recipe) -> str:
    """Put the recipe's weights into the trunk; what was loaded, in a sentence."""
    if recipe.weights is None:
        raise ValueError("expected a recipe with weights, got one without")
    path = backbones.pretrained_file(model.trunk) if recipe.weights == "pretrained" else Path(recipe.weights)
    loaded = backbones.load_weights(model.trunk, path)
    missing, unexpected = (f": {names[0]}, ..." if names else "" for names in (loaded.missing, loaded.unexpected))
    return (
        f"{len(loaded.loaded)} tensors from {path}, "
        f"{len(loaded.missing)} missing{missing}, {len(loaded.unexpected)} unexpected{unexpected}"
    )


def proxygml_settings(recipe: Recipe) -> ProxyGMLSettings:
    """The part of a recipe that is the loss's own."""
    return ProxyGMLSettings(**{one.name: getattr(recipe, one.name) for one in fields(ProxyGMLSettings)})


def build_loss(recipe: Recipe, num_classes: int) -> nn.Module:
    """The loss, for so many classes."""
    settings = proxygml_settings(recipe)
    if recipe.shard and dist.is_initialized():
        return ShardedProxyGMLLoss(num_classes, recipe.embedding_dim, settings, seed=recipe.seed)
    own = asdict(settings) if recipe.loss == "proxygml" else {}
    loss = losses.make(recipe.loss, num_classes, recipe.embedding_dim, own | parse_settings(recipe.loss_settings))
    if recipe.shard:  # one process begins as several do
        proxies = cast(nn.Parameter, loss.proxies)
        proxies.data = initial_proxies(proxies.shape, 0, num_classes, recipe.seed)
    return loss


def remarks(recipe: Recipe) -> dict[str, str]:
    """What is to stand beside every score of a loss that is remembered or reconstructed rather than read."""
    doubt = losses.find(recipe.loss).doubt
    return {"remark": f"{recipe.loss}: {doubt}"} if doubt else {}


def own_rate(recipe: Recipe) -> float:
    """The learning rate of what the loss learns itself."""
    return recipe.proxy_learning_rate or losses.find(recipe.loss).learning_rate


def build_optimizer(recipe: Recipe, model: nn.Module, loss: nn.Module) -> torch.optim.Optimizer:
    """One optimizer over groups with learning rates of their own: trunk, head, and the parameters of the loss."""
    rates = {
        "trunk": (model.trunk, recipe.learning_rate),
        "head": (model.head, recipe.head_learning_rate or recipe.learning_rate),
        **{name: (getattr(loss, name), rate) for name, rate in getattr(loss, "learning_rates", {}).items()},
        "proxies": (loss, own_rate(recipe)),
    }
    groups: list[dict[str, Any]] = []
    taken: set[int] = set()
    for name, (module, rate) in rates.items():
        parameters = [p for p in module.parameters() if p.requires_grad and id(p) not in taken]
        taken.update(map(id, parameters))
        groups.append({"name": name, "params": parameters, "lr": rate, "base_rate": rate})
    decay = recipe.weight_decay
    match recipe.optimizer:
        case "adam":
            kind = RowAdam if recipe.sparse_gradient else torch.optim.Adam
            return kind(groups, eps=recipe.adam_epsilon, fused=True, weight_decay=decay)
        case "adamw":
            return torch.optim.AdamW(groups, eps=recipe.adam_epsilon, fused=True, weight_decay=decay)
        case "sgd":
            return torch.optim.SGD(groups, momentum=0.9, fused=True, weight_decay=decay)
        case "rmsprop":
            return torch.optim.RMSprop(groups, eps=recipe.adam_epsilon, weight_decay=decay)


def draw_batches(recipe: Recipe, labels: np.ndarray, loss: nn.Module, epoch: int) -> list[np.ndarray]:
    """The batches of an epoch, as the recipe's loss wants them: labels (M,) -> image numbers."""
    method = losses.find(recipe.loss)
    chance = {"seed": recipe.seed, "epoch": epoch}
    if method.batches == "shuffled":
        order = sampling.streamed if recipe.dataset == "tar" else sampling.shuffled
        return order(len(labels), recipe.batch_size, **chance)
    size = (recipe.batch_size, recipe.images_per_class or method.images_per_class)
    distances = getattr(loss, "class_distances", None)
    if method.batches == "neighbouring" and distances is not None:
        return sampling.neighbouring(labels, *size, distances.cpu().numpy(), **chance)
    if method.batches == "two streams":
        return sampling.two_streams(labels, *size, share=cast(float, loss.structured_share), **chance)
    return sampling.balanced(labels, *size, **chance)
