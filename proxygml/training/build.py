"""The parts of a run from its recipe: images, network, loss, optimizer and batches."""

import inspect
import os
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from proxygml import backbones, losses
from proxygml import data as datasets
from proxygml.backbones.cascade import CascadedEmbedder
from proxygml.backbones.module import ModuleTrunk
from proxygml.backbones.trunk import Trunk
from proxygml.data import ImageList, limit_images, sampling
from proxygml.data.cache import Cache
from proxygml.data.images import Augmentation, Crops, FeatureCrops, center_crops, random_crops
from proxygml.data.objects import load_objects
from proxygml.display import Progress, counter, no_progress
from proxygml.losses.nested import NestedProxyGMLLoss
from proxygml.losses.proxygml.settings import ProxyGMLSettings
from proxygml.losses.proxygml.sharded import ShardedProxyGMLLoss, initial_proxies
from proxygml.optim import RowAdam
from proxygml.training.parts import Parts, class_name, make_loss
from proxygml.training.recipe import Recipe, is_class_name, parse_settings
from proxygml.training.run import Run

BACKBONE_CONFIG = "backbone"  # folder in an exported model: the configuration of an hf: backbone
Network = backbones.Embedder | CascadedEmbedder


def load_images(recipe: Recipe, data: Any = None, progress: Progress = no_progress) -> tuple[ImageList, ImageList]:
    """Training and test images: of the recipe's dataset, of an object, or of a function that returns one."""
    Parts(data=data).require(recipe, "data")
    if data is not None:
        if callable(data):
            data = call_with_folder(data, recipe.data)
        reading = counter(progress, "reading labels")
        both = load_objects(data, test_fraction=recipe.test_fraction, progress=reading)
        return limit_images(both, classes=recipe.classes, max_class_size=recipe.max_class_size)
    return datasets.load(
        recipe.dataset,
        recipe.data,
        size=recipe.image_size,
        classes=recipe.classes,
        max_class_size=recipe.max_class_size,
        test_fraction=recipe.test_fraction,
    )


def call_with_folder(make: Callable[..., Any], folder: str | None) -> Any:
    """What a function or class makes, of the folder of the data if there is one."""
    arguments = () if folder is None else (folder,)
    try:
        inspect.signature(make).bind(*arguments)
    except TypeError as error:
        takes = "no arguments without --data" if folder is None else f"the folder {folder}"
        raise ValueError(f"expected {class_name(make)} to take {takes}: {error}") from error
    return make(*arguments)


def load_run_images(run: Run, data: str | Path | None = None) -> tuple[ImageList, ImageList]:
    """The images of a run; `data` is their folder if they have moved."""
    recipe = run.recipe if data is None else run.recipe.changed({"data": str(data)})
    require_data(recipe, run.folder)
    return load_images(recipe)


def require_data(recipe: Recipe, folder: Path) -> None:
    """Raise an error if the images of the run in a folder are not where its recipe says."""
    if recipe.data is not None and not Path(recipe.data).exists():
        raise FileNotFoundError(f"the images of {folder} are not in {recipe.data}: name their folder with --data")


def find_device(name: str) -> torch.device | None:
    """The device of this name, or the best one for "auto"; None if this machine does not have it."""
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    kind = next(kind for kind in available if available[kind]) if name == "auto" else name
    if not available[kind]:
        return None
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, int(os.environ.get("LOCAL_RANK", 0)))


def training_cache(recipe: Recipe) -> Cache | None:
    """The cache of decoded training images, if any; test images are never cached, so that no score depends on it."""
    if recipe.cache is None or recipe.dataset == "tar":  # images in tar files have no path of their own
        return None
    return Cache(Path(recipe.cache), side=2 * recipe.image_size)  # a crop of a quarter of the area loses nothing


def training_crops(recipe: Recipe, images: ImageList, epoch: int) -> Crops | FeatureCrops:
    augmentation = Augmentation(recipe.crop_scale, recipe.crop_ratio, recipe.flip)
    return random_crops(images, recipe.image_size, augmentation, seed=recipe.seed, epoch=epoch)


def test_crops(recipe: Recipe, images: ImageList) -> Crops | FeatureCrops:
    return center_crops(images, recipe.test_side, recipe.test_crop)


def build_model(recipe: Recipe, network: nn.Module | None = None, config_folder: Path | None = None) -> Network:
    """The network that the recipe's loss needs, with random weights or on `network`, and with frozen stages.

    `config_folder` has the configuration of an hf: backbone, which is then not downloaded.
    """
    method = find_method(recipe)
    if network is not None:
        trunk: Trunk = ModuleTrunk(network, recipe.image_size)
    elif is_class_name(recipe.backbone):
        Parts().require(recipe, "network")
    else:
        trunk = backbones.build_trunk(recipe.backbone, config_folder)
    if method.network == "three heads":
        if recipe.feature_crops:
            raise ValueError(f"{recipe.loss} taps stages of the network, which feature_crops does not run: set it to 0")
        if network is not None:
            raise ValueError(f"{recipe.loss} taps stages of a network by name, which yours does not have")
        model: Network = CascadedEmbedder(trunk, recipe.embedding_dim)
    else:
        if recipe.head == "none" and trunk.channels != recipe.embedding_dim:
            dimensions = f"embedding_dim {trunk.channels}, got {recipe.embedding_dim}"
            raise ValueError(
                f"head none makes the network's {trunk.channels} features the embedding: expected {dimensions}"
            )
        model = backbones.Embedder(
            trunk,
            recipe.embedding_dim if recipe.head == "linear" else None,
            pooling=recipe.pooling,
            normalize=method.unit_length if recipe.unit_length is None else recipe.unit_length,
            normalize_features=method.network == "batch-norm head",
        )
    if recipe.head_start == "kaiming":
        backbones.init_head(model.head)
    backbones.freeze_stages(trunk, recipe.frozen)
    if recipe.feature_crops:
        trunk.requires_grad_(False)
    return model


def without_head(model: nn.Module, recipe: Recipe, *, normalize: bool = False) -> backbones.Embedder:
    """A network on the same trunk that returns its pooled features."""
    return backbones.Embedder(cast(Trunk, model.trunk), None, pooling=recipe.pooling, normalize=normalize)


def load_model(run: Run, network: nn.Module | None = None) -> Network:
    """The trained network of a run, in evaluation mode; `network` as in its training, if that was an object."""
    Parts(network=network).require(run.recipe, "network")
    config_folder = run.folder / BACKBONE_CONFIG
    model = build_model(run.recipe, network, config_folder if config_folder.is_dir() else None)
    try:
        model.load_state_dict(run.load_best()["model"])
    except RuntimeError as error:
        fault = "model.safetensors does not fit recipe.json: was one of them changed?"
        if network is not None:
            fault = f"its weights do not fit this {type(network).__name__}: build it as for training"
        raise ValueError(f"{run.folder}: {fault}") from error
    return model.eval()


def find_method(recipe: Recipe, loss: object = None) -> losses.Method:
    """What the loss needs: as listed for its name, or as a loss of your own says."""
    return losses.needs_of(loss) if is_class_name(recipe.loss) else losses.find(recipe.loss)


def proxygml_settings(recipe: Recipe) -> ProxyGMLSettings:
    """The ProxyGML settings of a recipe."""
    return ProxyGMLSettings(**{one.name: getattr(recipe, one.name) for one in fields(ProxyGMLSettings)})


def build_loss(recipe: Recipe, num_classes: int, loss: nn.Module | Callable[..., nn.Module] | None = None) -> nn.Module:
    """The loss for this number of classes, or the one that is passed as an object."""
    settings = parse_settings(recipe.loss_settings)
    if loss is not None:
        return make_loss(loss, num_classes, recipe.embedding_dim, settings)
    own = proxygml_settings(recipe)
    if recipe.shard and dist.is_initialized():
        return ShardedProxyGMLLoss(num_classes, recipe.embedding_dim, own, seed=recipe.seed)
    if recipe.nested:
        return NestedProxyGMLLoss(num_classes, recipe.embedding_dim, recipe.nested, own)
    known = losses.defaults(recipe.loss) if recipe.is_proxygml else {}
    own_settings = {name: value for name, value in asdict(own).items() if name in known}
    made = losses.make(recipe.loss, num_classes, recipe.embedding_dim, own_settings | settings)
    if recipe.shard:  # the same initial proxies as with several processes
        proxies = cast(nn.Parameter, made.proxies)
        proxies.data = initial_proxies(proxies.shape, 0, num_classes, recipe.seed)
    return made


def remarks(recipe: Recipe) -> dict[str, str]:
    """A remark for the scores of a loss that was reconstructed rather than taken from its code."""
    caveat = find_method(recipe).caveat
    return {"remark": f"{recipe.loss}: {caveat}"} if caveat else {}


def own_rate(recipe: Recipe, loss: object = None) -> float:
    """The learning rate of the loss's own parameters."""
    return recipe.proxy_learning_rate or find_method(recipe, loss).learning_rate


def build_optimizer(recipe: Recipe, model: nn.Module, loss: nn.Module) -> torch.optim.Optimizer:
    """One optimizer over groups with learning rates of their own: trunk, head, and the parameters of the loss."""
    rates = {
        "trunk": (model.trunk, recipe.learning_rate),
        "head": (model.head, recipe.head_learning_rate or recipe.learning_rate),
        **{name: (getattr(loss, name), rate) for name, rate in getattr(loss, "learning_rates", {}).items()},
        "proxies": (loss, own_rate(recipe, loss)),
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
    """The batches of an epoch, as the recipe's loss needs them: labels (M,) -> image indices."""
    method = find_method(recipe, loss)
    distances = getattr(loss, "class_distances", None)
    return sampling.draw_batches(
        "streamed" if method.batches == "shuffled" and recipe.dataset == "tar" else method.batches,
        labels,
        recipe.batch_size,
        recipe.images_per_class or method.images_per_class,
        class_distances=None if distances is None else distances.cpu().numpy(),
        structured_fraction=getattr(loss, "structured_fraction", 0.75),
        seed=recipe.seed,
        epoch=epoch,
    )
