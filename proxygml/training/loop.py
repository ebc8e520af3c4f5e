"""A network that learns: epoch by epoch, in one process or in several that share each batch; and its state."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from proxygml.data import ImageList
from proxygml.data.images import Crops, FeatureCrops
from proxygml.data.loading import load_batches
from proxygml.distributed.batch_norm import join_batch_norms
from proxygml.distributed.checkpoints import load_shards, save_shards
from proxygml.distributed.collectives import gather_rows, sum_over_processes
from proxygml.losses.proxygml.settings import choose_links
from proxygml.training import build
from proxygml.training.monitor import StepMonitor, are_finite, terms_of
from proxygml.training.recipe import Recipe


def learning_rate_factor(recipe: Recipe, epoch: float) -> float:
    """What the learning rates are multiplied by at this (fractional) epoch."""
    if recipe.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * epoch / recipe.epochs))
    return recipe.decay_factor ** sum(epoch >= milestone for milestone in recipe.decay)


def narrowed_links(recipe: Recipe, num_classes: int, epoch: int) -> int:
    """k in an epoch, counted from 0, of a run whose ratio falls from `start_ratio` to `ratio`."""
    done = epoch / max(1, recipe.epochs - 1)
    ratio = cast(float, recipe.start_ratio) ** (1 - done) * recipe.ratio**done
    return choose_links(num_classes, recipe.proxies_per_class, ratio)


class TrainingLoop:
    """Network, loss and optimizer, and the images they learn from.

    Of several processes each has its part of a batch, and from all embeddings the loss of the whole batch.
    """

    def __init__(self, recipe: Recipe, fabric: Fabric, model: nn.Module, images: ImageList) -> None:
        self.recipe, self.fabric, self.images = recipe, fabric, images
        self.place = "the beginning"
        self.skipped = 0  # steps in a row
        loss = build.build_loss(recipe, len(images.class_names))
        # Settings that give no batches, or images too small for the network, are found now, before there is a folder.
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
            join_batch_norms(model)
        self.model, self.loss = fabric.setup_module(model), loss.to(fabric.device)
        self.optimizer = cast(torch.optim.Optimizer, fabric.setup_optimizers(optimizer))

    def train_epoch(
        self,
        epoch: int,
        *,
        embed: Callable[[], tuple[Tensor, Tensor]],
        progress: Callable[[int, int, float], None],
    ) -> dict[str, float]:
        """Every training image once; mean losses and the learning rates at the end.

        `embed` gives embeddings (M, D) and labels (M,) of all training images to a loss that asks for them; `progress`
        is told (step, of how many in all epochs, loss). A step whose gradient has NaN or infinity in it is skipped and
        counted in `skipped_steps`; too many in a row are an error.
        """
        recipe, optimizer = self.recipe, self.optimizer
        begin_epoch = getattr(self.loss, "begin_epoch", None)
        if begin_epoch is not None:
            begin_epoch(epoch, embed)
        self.model.train()
        if recipe.freeze_batch_norm:
            _keep_statistics(self.model)
        for name in recipe.frozen:
            for module in self.model.trunk.stage_modules(name):
                _keep_statistics(module)
        for parameter in self.trunk:
            parameter.requires_grad_(epoch not in recipe.warmup)
        if recipe.start_ratio is not None:
            self.loss.links = narrowed_links(recipe, len(self.images.class_names), epoch)  # type: ignore[assignment]

        batches = build.draw_batches(recipe, self.images.labels, self.loss, epoch)
        monitor = StepMonitor(self.fabric.device, in_a_row=self.skipped)
        for step, (images, labels) in enumerate(self._load(batches, epoch)):
            self.place = f"epoch {epoch + 1}, step {step + 1}"
            factor = learning_rate_factor(recipe, epoch + step / len(batches))
            for group in optimizer.param_groups:
                group["lr"] = group["base_rate"] * factor
            device = self.fabric.device
            value = self._loss_of(images.to(device, non_blocking=True), labels.to(device, non_blocking=True))
            optimizer.zero_grad()
            self.fabric.backward(value)
            finite = self._gradient_is_finite()
            self._step(finite)
            try:
                monitor.add(terms_of(self.loss, value), finite, len(batches[step]))
            except ValueError as error:
                raise ValueError(f"{self.place}: {error}") from error
            progress(epoch * len(batches) + step + 1, recipe.epochs * len(batches), monitor.value)
        means, self.skipped = monitor.means(), monitor.in_a_row
        return means | {f"learning_rate_{group['name']}": group["lr"] for group in optimizer.param_groups}

    def _step(self, finite: Tensor) -> None:
        """A step of the optimizer, unless the gradient is not finite; a fused one finds that out on its device."""
        inner: Any = getattr(self.optimizer, "optimizer", self.optimizer)  # what Fabric has wrapped
        if self.recipe.precision == "16-mixed":  # GradScaler skips such a step, and lowers its scale
            self.optimizer.step()
        elif inner.defaults.get("fused") and not self.recipe.sparse_gradient:
            inner.found_inf = (~finite).float()
            self.optimizer.step()
        elif finite:
            self.optimizer.step()

    def _gradient_is_finite(self) -> Tensor:
        """Whether no gradient of any process has NaN or infinity in it."""
        gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        finite = are_finite(gradients)
        if self.fabric.world_size > 1:  # each process knows only its own sharded proxies
            finite = sum_over_processes((~finite).float()) == 0
        return finite

    def _loss_of(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch, of which several processes have a part each: images (b, 3, H, W), labels (b,)."""
        embeddings = self.model(images)  # (b, D)
        if self.fabric.world_size == 1 or self.recipe.shard:  # which gathers them itself
            return self.loss(embeddings, labels)
        embeddings, labels = (gather_rows(rows, shared=False) for rows in (embeddings, labels))  # (B, D), (B,)
        chance = self.fabric.broadcast(torch.get_rng_state())  # dropout has drawn differently for other images
        with torch.random.fork_rng(devices=[]):  # what the loss draws at random is the same everywhere
            torch.set_rng_state(chance)
            return self.loss(embeddings, labels)

    def _load(self, batches: list, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each batch of an epoch the part of this process: images (b, 3, H, W), labels (b,); it may be empty."""
        crops = build.training_crops(self.recipe, self.images, epoch)
        parts = [np.array_split(batch, self.fabric.world_size)[self.fabric.global_rank] for batch in batches]
        collate = partial(_collate, crops=crops)
        loader: DataLoader = DataLoader(
            crops,  # type: ignore[arg-type]  # they are no Dataset, but have what it needs: a length and items
            batch_sampler=parts,  # type: ignore[arg-type]  # arrays do as well as lists
            num_workers=self.recipe.workers,
            collate_fn=collate,
            pin_memory=self.fabric.device.type == "cuda",
        )
        return load_batches(loader)

    def weights(self) -> dict[str, dict]:
        """What is trained, but for proxies that are spread over processes."""
        return {"model": self.model.state_dict(), "loss": {} if self.recipe.shard else self.loss.state_dict()}

    def state(self) -> dict:
        """What `restore` needs; of proxies that are spread each process keeps its own with `save_shards`."""
        optimizer = self.optimizer.state_dict()
        if self.recipe.shard:
            (place,) = optimizer["param_groups"][-1]["params"]
            optimizer["state"][place] = {"step": optimizer["state"][place]["step"]}
        return self.weights() | {
            "optimizer": optimizer,
            "random_state": torch.get_rng_state(),
            "processes": self.fabric.world_size,
        }

    def save_shards(self, folder: Path) -> None:
        save_shards(folder, self._shards(), len(self.images.class_names))

    def restore(self, state: dict) -> None:
        """Go on from a state; proxies that are spread lie in its folder "shards"."""
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if not self.recipe.shard:
                self.loss.load_state_dict(state["loss"])
            torch.set_rng_state(state["random_state"])
        except Exception as error:  # of what does not fit, torch raises whatever it stumbles over
            raise ValueError("the checkpoint does not fit recipe.json or the data: were they changed?") from error
        if self.recipe.shard:
            load_shards(state["shards"], self._shards(), len(self.images.class_names), state["shard_checksums"])

    def _shards(self) -> dict[str, Tensor]:
        """The proxies here and Adam's moments of them: (classes here, N, D) each."""
        proxies = cast(nn.Parameter, self.loss.proxies)
        state = self.optimizer.state[proxies]
        state.setdefault("step", torch.zeros((), device=proxies.device))  # where every step so far was skipped
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(proxies)
        return {"proxies": proxies.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}


def _collate(items: list, crops: Crops | FeatureCrops) -> list[Tensor]:
    """Images and labels as one tensor each; where there are none, of the same form without a row."""
    return default_collate(items) if items else [part[:0] for part in default_collate([crops[0]])]


def _keep_statistics(network: nn.Module) -> None:
    """Batch normalization keeps its means and variances; its scale and shift still learn."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
