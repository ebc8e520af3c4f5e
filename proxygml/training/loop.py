"""TrainingLoop: trains network and loss epoch by epoch, in one process or several; saves and restores their state."""

import math
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, default_collate

from proxygml.data import ImageList
from proxygml.data.images import Crops, FeatureCrops
from proxygml.data.loading import load_batches
from proxygml.distributed.batch_norm import join_batch_norms
from proxygml.distributed.checkpoints import load_shards, save_shards
from proxygml.distributed.collectives import average_gradients, gather_rows, sum_over_processes
from proxygml.files import one_line
from proxygml.losses.interface import without_autocast
from proxygml.losses.proxygml.settings import choose_links
from proxygml.training import build
from proxygml.training.monitor import StepMonitor, are_finite, loss_terms
from proxygml.training.recipe import Recipe, is_class_name

PREFETCH = 4  # batches that each worker prepares ahead for a GPU; torch's default is 2


def learning_rate_factor(recipe: Recipe, epoch: float) -> float:
    """The factor of the learning rates at this (fractional) epoch."""
    if recipe.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * epoch / recipe.epochs))
    return recipe.decay_factor ** sum(epoch >= milestone for milestone in recipe.decay)


def scheduled_links(recipe: Recipe, num_classes: int, epoch: int) -> int:
    """k in an epoch, counted from 0, while the ratio decreases from `start_ratio` to `ratio`."""
    progress = epoch / max(1, recipe.epochs - 1)
    ratio = cast(float, recipe.start_ratio) ** (1 - progress) * recipe.ratio**progress
    return choose_links(num_classes, recipe.proxies_per_class, ratio)


class TrainingLoop:
    """Network, loss and optimizer, and the training images.

    Each of several processes embeds a part of a batch; the loss is that of the whole batch in each of them.
    """

    def __init__(self, recipe: Recipe, fabric: Fabric, model: nn.Module, loss: nn.Module, images: ImageList) -> None:
        self.recipe, self.fabric, self.images = recipe, fabric, images
        self.position = "the start"  # later "epoch 2, step 5"
        self.skipped_in_a_row = 0
        self.warming_up = False  # the trunk is not trained
        # Fail before a folder is created if no batch can be drawn or the images are too small for the network.
        build.draw_batches(recipe, images.labels, loss, epoch=0)
        with torch.no_grad():
            model.eval()(torch.from_numpy(build.test_crops(recipe, images)[0][0])[None])
        watch = getattr(loss, "watch", None)
        if watch is not None:
            if fabric.world_size > 1:
                raise ValueError(f"{recipe.loss} runs the network itself, which processes cannot share: use one")
            watch(model)
        optimizer = build.build_optimizer(recipe, model, loss)
        self.trunk = next(group["params"] for group in optimizer.param_groups if group["name"] == "trunk")
        if fabric.world_size > 1:
            join_batch_norms(model, fabric.device)
        self.model, self.loss = fabric.setup_module(model), loss.to(fabric.device)
        self.optimizer = cast(torch.optim.Optimizer, fabric.setup_optimizers(optimizer))

    @property
    def on_cuda(self) -> bool:
        return self.fabric.device.type == "cuda"

    def train_epoch(
        self,
        epoch: int,
        *,
        embed: Callable[[], tuple[Tensor, Tensor]],
        progress: Callable[[int, int, float], None],
    ) -> dict[str, float]:
        """Train on every image once; returns mean losses and the learning rates at the end.

        `embed` returns embeddings (M, D) and labels (M,) of all training images for losses that need them; `progress`
        receives (step, steps in all epochs, loss). A step with NaN or infinity in its gradient is skipped and counted
        in `skipped_steps`; too many in a row are an error.
        """
        recipe, optimizer = self.recipe, self.optimizer
        self.position = f"epoch {epoch + 1}, step 1"  # processes exchange embeddings and batches before it
        begin_epoch = getattr(self.loss, "begin_epoch", None)
        if begin_epoch is not None:
            begin_epoch(epoch, embed)
        self.model.train()
        frozen = [module for name in recipe.frozen for module in self.model.trunk.stage_modules(name)]
        for module in [self.model] if recipe.freeze_batch_norm else frozen:
            freeze_statistics(module)
        self.warming_up = epoch in recipe.warmup
        for parameter in self.trunk:
            parameter.requires_grad_(not self.warming_up)
        if recipe.start_ratio is not None:
            self.loss.links = scheduled_links(recipe, len(self.images.class_names), epoch)  # type: ignore[assignment]

        batches = build.draw_batches(recipe, self.images.labels, self.loss, epoch)
        batches = self.fabric.broadcast(batches)  # some losses draw by distances, whose last digit may differ
        monitor = StepMonitor(self.fabric.device, in_a_row=self.skipped_in_a_row)
        for step, (images, labels) in enumerate(self._load(batches, epoch)):
            self.position = f"epoch {epoch + 1}, step {step + 1}"
            factor = learning_rate_factor(recipe, epoch + step / len(batches))
            for group in optimizer.param_groups:
                group["lr"] = group["base_rate"] * factor
            value, finite = self.train_step(images, labels, (recipe.seed, epoch, step))
            try:
                monitor.add(loss_terms(self.loss, value), finite, len(batches[step]))
            except ValueError as error:
                raise ValueError(f"{self.position}: {error}") from error
            progress(epoch * len(batches) + step + 1, recipe.epochs * len(batches), monitor.value)
        means, self.skipped_in_a_row = monitor.means(), monitor.in_a_row
        return means | {f"learning_rate_{group['name']}": group["lr"] for group in optimizer.param_groups}

    def train_step(self, images: Tensor, labels: Tensor, seed: tuple[int, ...] = ()) -> tuple[Tensor, Tensor]:
        """One step on this process's part of a batch: images (b, 3, H, W), labels (b,) -> loss, is_finite.

        If a gradient is not finite, no parameter changes. With a fused optimizer nothing is read from the device.
        `seed` is that of random draws in the loss.
        """
        device, several = self.fabric.device, self.fabric.world_size > 1
        with self.fabric.no_backward_sync(self.model, enabled=self.warming_up):  # DDP expects gradients of the trunk
            value = self._compute_loss(images.to(device, non_blocking=True), labels.to(device, non_blocking=True), seed)
            self.optimizer.zero_grad()
            self.fabric.backward(value)
        if several:
            parameters = [] if self.recipe.shard else [*self.loss.parameters()]
            average_gradients([*parameters, *(self.model.head.parameters() if self.warming_up else ())])
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        finite = are_finite(gradients)
        if several:  # sharded proxies differ between processes
            finite = sum_over_processes((~finite).float()) == 0
        inner: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # Fabric wraps it
        if getattr(self.fabric.strategy.precision, "scaler", None) is not None:  # it skips the step, if all do
            gradients[0].masked_fill_(~finite, math.inf)
        elif inner.defaults.get("fused"):
            inner.found_inf = (~finite).float()
        elif not finite:
            return value, finite
        self.optimizer.step()
        return value, finite

    def _compute_loss(self, images: Tensor, labels: Tensor, seed: tuple[int, ...]) -> Tensor:
        """The loss of the whole batch from this process's part: images (b, 3, H, W), labels (b,)."""
        embeddings = self.model(images)  # (b, D)
        if self.fabric.world_size > 1 and not self.recipe.shard:  # the sharded loss gathers them itself
            embeddings, labels = (gather_rows(rows, shared=False) for rows in (embeddings, labels))  # (B, D), (B,)
        state = int(np.random.SeedSequence(seed).generate_state(1)[0])
        with torch.random.fork_rng([self.fabric.device] if self.on_cuda else []):  # equal draws in all processes
            (torch.manual_seed if self.on_cuda else torch.default_generator.manual_seed)(state)  # the latter is faster
            if not is_class_name(self.recipe.loss):  # all of this package compute in full float32
                return self.loss(embeddings, labels)
            with without_autocast(embeddings.device.type):
                return own_loss(self.loss, embeddings.float(), labels, self.recipe.loss)

    def _load(self, batches: list, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's part of each batch: images (b, 3, H, W), labels (b,); b may be 0."""
        crops = build.training_crops(self.recipe, self.images, epoch)
        parts = [np.array_split(batch, self.fabric.world_size)[self.fabric.global_rank] for batch in batches]
        workers = self.recipe.workers
        loader: DataLoader = DataLoader(
            crops,  # type: ignore[arg-type]  # has a length and items, as a Dataset
            batch_sampler=parts,  # type: ignore[arg-type]  # arrays instead of lists
            num_workers=workers,
            collate_fn=partial(_collate, crops=crops),
            pin_memory=self.on_cuda,
            prefetch_factor=PREFETCH if self.on_cuda and workers else None,
        )
        return load_batches(loader)

    def weights(self) -> dict[str, dict]:
        """The weights of network and loss, without sharded proxies."""
        return {"model": self.model.state_dict(), "loss": {} if self.recipe.shard else self.loss.state_dict()}

    def state(self) -> dict:
        """The state for `restore`, without sharded proxies: see `save_shards`."""
        optimizer = self.optimizer.state_dict()
        if self.recipe.shard:
            (proxies,) = optimizer["param_groups"][-1]["params"]
            optimizer["state"][proxies] = {"step": optimizer["state"][proxies]["step"]}
        return self.weights() | {
            "optimizer": optimizer,
            "random_state": torch.get_rng_state(),
            "cuda_random_state": torch.cuda.get_rng_state(self.fabric.device) if self.on_cuda else None,
            "grad_scaler": self.fabric.strategy.precision.state_dict(),
            "processes": self.fabric.world_size,
            "labels": zlib.crc32(self.images.labels.tobytes()),
        }

    def save_shards(self, folder: Path) -> None:
        """Write the sharded proxies; all processes must call it."""
        save_shards(folder, self._shards(), len(self.images.class_names))

    def restore(self, state: dict) -> None:
        """Continue from a state; `state["shards"]` is the folder of sharded proxies."""
        if state.get("labels") != zlib.crc32(self.images.labels.tobytes()):
            raise ValueError("the training images are not those of the checkpoint: were images or classes added?")
        settings = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            for group, own in zip(self.optimizer.param_groups, settings, strict=True):
                group.update(own)  # the recipe's, not the checkpoint's
            if not self.recipe.shard:
                self.loss.load_state_dict(state["loss"])
            torch.set_rng_state(state["random_state"])
            if self.on_cuda and state.get("cuda_random_state") is not None:  # None: was trained on another device
                torch.cuda.set_rng_state(state["cuda_random_state"], self.fabric.device)
            if state.get("grad_scaler"):
                self.fabric.strategy.precision.load_state_dict(state["grad_scaler"])
        except Exception as error:  # torch raises many types for a state that does not fit
            changed = "recipe.json, the data, or the network and loss that were passed: were they changed?"
            raise ValueError(f"the checkpoint does not fit {changed}") from error
        if self.recipe.shard:
            load_shards(state["shards"], self._shards(), len(self.images.class_names), state["shard_checksums"])

    def _shards(self) -> dict[str, Tensor]:
        """This process's proxies and Adam's moments of them: (classes here, N, D) each."""
        proxies = cast(nn.Parameter, self.loss.proxies)
        state = self.optimizer.state[proxies]
        state.setdefault("step", torch.zeros((), device=proxies.device))  # absent if every step was skipped
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(proxies)
        return {"proxies": proxies.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


def _collate(items: list, crops: Crops | FeatureCrops) -> list[Tensor]:
    """Images (b, 3, H, W) and labels (b,), also for b = 0."""
    return default_collate(items) if items else [part[:0] for part in default_collate([crops[0]])]


def own_loss(loss: nn.Module, embeddings: Tensor, labels: Tensor, name: str) -> Tensor:
    """The value of a loss of your own; an error if it fails or cannot be minimized."""
    try:
        value = loss(embeddings, labels)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, IndexError) as error:
        given = f"embeddings {tuple(embeddings.shape)} and labels in 0..{labels.max().item()}"
        raise ValueError(f"{name} failed for {given}: {one_line(error)}") from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"expected a scalar from {name}(embeddings, labels), got {got}: return the mean")
    if not value.requires_grad:
        raise ValueError(f"the value of {name} has no gradient: compute it from the embeddings, without detach")
    return value.reshape(())


def freeze_statistics(network: nn.Module) -> None:
    """Keep the running statistics of batch normalization; its weight and bias are still trained."""
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
