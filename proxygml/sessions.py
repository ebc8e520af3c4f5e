"""A run under way: epoch by epoch, judged, logged and written, in one process or shared by several."""

import math
import re
import resource
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate

from proxygml import evaluation, ingredients, pictures
from proxygml.backbones.joint_norm import join_batch_norms
from proxygml.cache import Cache
from proxygml.datasets import ImageList
from proxygml.gathering import gather_rows
from proxygml.judging import Judge
from proxygml.recipes import Recipe
from proxygml.runs import Run
from proxygml.shards import load_shards, save_shards

OF_PROCESSES = re.compile("gloo|nccl|peer|socket|timed out|distributed", re.IGNORECASE)  # errors of their connection
Progress = Callable[[str, int, int, str], None]  # what is going on, done, of how many (0: just a remark), a note


def learning_rate_factor(recipe: Recipe, epoch: float) -> float:
    """What the learning rates are multiplied by at this (fractional) epoch."""
    if recipe.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * epoch / recipe.epochs))
    return recipe.decay_factor ** sum(epoch >= milestone for milestone in recipe.decay)


class Session:
    """A run under way: its images, network, loss and optimizer, and what has been found so far.

    Of several processes each has its part of a batch, and from all embeddings the loss of the whole batch; the first
    one writes what is found.
    """

    def __init__(self, recipe: Recipe, fabric: Fabric, progress: Progress, checkpoint: dict | None) -> None:
        self.recipe, self.fabric = recipe, fabric
        self.writes = fabric.is_global_zero
        self.progress = progress = progress if self.writes else nobody_watches
        self.judge = Judge(recipe, fabric, progress)
        self.log: list[dict] = []
        self.best: dict | None = None  # epoch, and map_at_r on what it was chosen on
        self.scores: dict = {}
        self.place = "the beginning"

        progress("loading images", 0, 1, recipe.dataset)
        train_images, self.test_images = ingredients.load_images(recipe)
        model = ingredients.build_model(recipe)  # before every image is decoded, which takes longer to fail
        if checkpoint is None and recipe.weights is not None:
            progress("weights", 0, 0, ingredients.load_pretrained(model, recipe))
        train_images = self._usable(train_images, "training", ingredients.training_cache(recipe))
        if recipe.test or recipe.tested_epochs:
            self.test_images = self._usable(self.test_images, "test", None)
        self.train_images, self.held_out_images = ingredients.hold_out(train_images, recipe.held_out)
        loss = ingredients.build_loss(recipe, len(self.train_images.class_names))
        # Settings that give no batches, or images too small for the network, are found now, before there is a folder.
        ingredients.draw_batches(recipe, self.train_images.labels, loss, epoch=0)
        with torch.no_grad():
            model.eval()(ingredients.test_crops(recipe, self.train_images)[0][0][None])
        if hasattr(loss, "watch"):
            loss.watch(model)
        optimizer = ingredients.build_optimizer(recipe, model, loss)
        self.trunk = next(group["params"] for group in optimizer.param_groups if group["name"] == "trunk")
        if fabric.world_size > 1:
            if hasattr(loss, "watch"):
                raise ValueError(f"{recipe.loss} runs the network itself, which processes cannot share: use one")
            join_batch_norms(model)
        self.model, self.loss = self.fabric.setup_module(model), loss.to(fabric.device)
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        if checkpoint is not None:
            self._restore(checkpoint)

    def finish_together(self, run: Run) -> Run:
        """`finish`, and where another process is gone, an error that says so and how to go on."""
        try:
            return self.finish(run)
        except RuntimeError as error:
            if self.fabric.world_size == 1 or not OF_PROCESSES.search(str(error)):
                raise
            rank, reason = self.fabric.global_rank, str(error).splitlines()[0]
            raise ValueError(
                f"process {rank} of {self.fabric.world_size} no longer reaches the others since {self.place}: one has "
                f"ended or hangs ({reason}). Go on with --resume {run.folder}"
            ) from error

    def finish(self, run: Run) -> Run:
        """Train the epochs that are left, score the best network on the test classes, draw the pictures."""
        if not self.log and self.recipe.baselines and self.recipe.test:
            self.scores |= self.judge.compare_with(self.model, self.test_images)
        if self.writes:
            run.write_log(self.log)
        for epoch in range(len(self.log), self.recipe.epochs):
            self._train_and_judge(epoch, run)
        self.fabric.barrier()  # the best network is written
        self._take_best(run)
        trained = {}
        if self.recipe.test:
            embeddings = self.judge.embed(self.model, self.test_images, "scoring test classes")
            trained["trained"] = self.judge.evaluate(embeddings, cluster=True).to_json()
        if self.held_out_images is not None:
            trained["held_out"] = self.log[self.best["epoch"] - 1]["held_out"]
        if not self.writes:
            return run
        trained |= ingredients.remarks(self.recipe)
        seconds = sum(entry["seconds"] for entry in self.log)
        run.write_scores(trained | self.scores | {"best_epoch": self.best["epoch"], "seconds": seconds})
        self.progress("drawing pictures", 0, 1, "")
        pictures.draw_curves(self.log, run.folder / "curves.png")
        if not self.recipe.test:
            return run
        vectors, labels = embeddings.vectors, embeddings.labels
        if not self.test_images.are_maps:
            pictures.draw_retrieval(self.test_images.open, vectors, labels, run.folder / "retrieval.png")
        pictures.draw_map(vectors, labels, self.test_images.class_names, run.folder / "map.png")
        return run

    def _take_best(self, run: Run) -> None:
        """The weights of the best epoch; where best.pt is damaged and the last epoch was the best, from that."""
        try:
            self.model.load_state_dict(run.load_best()["model"])
        except (ValueError, FileNotFoundError):
            if self.best["epoch"] != len(self.log):
                raise
            self._save_best(run)

    def _save_best(self, run: Run) -> None:
        if self.writes:
            weights = {"model": self.model.state_dict(), "loss": {} if self.recipe.shard else self.loss.state_dict()}
            run.save_best(weights | {"epoch": self.best["epoch"]})

    def _train_and_judge(self, epoch: int, run: Run) -> None:
        """One epoch, its entry in the log, and its checkpoint."""
        started = time.perf_counter()
        entry = {"epoch": epoch + 1} | self._train_epoch(epoch)
        entry["training_seconds"] = time.perf_counter() - started
        entry["images_per_second"] = len(self.train_images) / entry["training_seconds"]
        entry["peak_memory_mb"] = _peak_memory_mb(self.fabric.device)
        verdict = None
        if self.held_out_images is not None:
            verdict = self.judge.score(self.model, self.held_out_images, "scoring held-out classes", cluster=False)
            entry["held_out"] = verdict.to_json()
        tested = self.recipe.tested_epochs
        if epoch + 1 in tested or (tested and epoch + 1 == self.recipe.epochs):
            test_scores = self._test()
            entry["test"] = test_scores.to_json()
            verdict = verdict or test_scores
        entry["seconds"] = time.perf_counter() - started
        if self._is_best(verdict):
            self.best = {"epoch": epoch + 1, "map_at_r": None if verdict is None else verdict.map_at_r}
            self._save_best(run)
        self.log.append(entry)
        if self.writes:
            run.write_log(self.log)
        self._save_last(run)

    def _test(self) -> evaluation.Scores:
        """The test classes as they are found now, and clustered too where they are found better than ever before."""
        embeddings = self.judge.embed(self.model, self.test_images, "scoring test classes")
        scores = self.judge.evaluate(embeddings, cluster=False)
        first = f"recall@{self.recipe.recall_at[0]}"
        highest = max((entry["test"][first] for entry in self.log if "test" in entry), default=-1)
        return self.judge.evaluate(embeddings, cluster=True) if scores.to_json()[first] > highest else scores

    def _is_best(self, verdict: evaluation.Scores | None) -> bool:
        """Whether the newest epoch is the best so far; where none is ever judged, the newest always is."""
        so_far = None if self.best is None else self.best["map_at_r"]
        if verdict is None:
            return so_far is None
        return so_far is None or verdict.map_at_r > so_far

    def _train_epoch(self, epoch: int) -> dict[str, float]:
        """Every training image once; mean losses and the learning rates at the end."""
        recipe, optimizer = self.recipe, self.optimizer
        if hasattr(self.loss, "begin_epoch"):
            self.loss.begin_epoch(epoch, self._embed_training_images)
        self.model.train()
        if recipe.freeze_batch_norm:
            _keep_statistics(self.model)
        for name in recipe.frozen:
            for module in self.model.trunk.modules_of(name):
                _keep_statistics(module)
        for parameter in self.trunk:
            parameter.requires_grad_(epoch not in recipe.warmup)

        batches = ingredients.draw_batches(recipe, self.train_images.labels, self.loss, epoch)
        sums: dict[str, float] = {}
        for step, (images, labels) in enumerate(self._load(batches, epoch)):
            self.place = f"epoch {epoch + 1}, step {step + 1}"
            factor = learning_rate_factor(recipe, epoch + step / len(batches))
            for group in optimizer.param_groups:
                group["lr"] = group["base_rate"] * factor
            value = self._loss_of(images.to(self.fabric.device), labels.to(self.fabric.device))
            if not math.isfinite(value.item()):
                raise ValueError(f"the loss became {value.item()} in epoch {epoch + 1}: lower learning_rate")
            optimizer.zero_grad()
            self.fabric.backward(value)
            optimizer.step()
            for name, term in _terms(self.loss, value):
                sums[name] = sums.get(name, 0.0) + term * len(batches[step])
            done, total = epoch * len(batches) + step + 1, recipe.epochs * len(batches)
            note = f"epoch {epoch + 1}/{recipe.epochs} loss {value.item():.2f}{_held_out_note(self.log)}"
            self.progress("training", done, total, note)
        seen = sum(map(len, batches))
        means = {name: total / seen for name, total in sums.items()}
        return means | {f"learning_rate_{group['name']}": group["lr"] for group in optimizer.param_groups}

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
        crops = ingredients.training_crops(self.recipe, self.train_images, epoch)
        parts = [np.array_split(batch, self.fabric.world_size)[self.fabric.global_rank] for batch in batches]
        collate = partial(_collate, crops=crops)
        return iter(DataLoader(crops, batch_sampler=parts, num_workers=self.recipe.workers, collate_fn=collate))

    def _embed_training_images(self) -> tuple[Tensor, Tensor]:
        """Embeddings (M, D) of the training images as they are, not augmented, and their labels (M,)."""
        embeddings = self.judge.embed(self.model, self.train_images, "embedding training images")
        return tuple(torch.from_numpy(part).to(self.fabric.device) for part in (embeddings.vectors, embeddings.labels))

    def _usable(self, images: ImageList, what: str, cache: Cache | None) -> ImageList:
        def checked(done: int, total: int) -> None:
            self.progress(f"checking {what} images", done, total, "")

        kept, broken = ingredients.usable(images, self.recipe, cache, checked)
        if broken:
            self.progress("skipped", 0, 0, f"{broken} of {len(images)} {what} images that cannot be read")
            self.scores[f"skipped_{what}_images"] = broken
        return kept

    def _save_last(self, run: Run) -> None:
        """The first process writes everything but proxies that are spread, of which each writes its own before."""
        optimizer, loss = self.optimizer.state_dict(), self.loss.state_dict()
        if self.recipe.shard:
            run.clear_shards(len(self.log), self.writes)
            self.fabric.barrier()
            save_shards(run.shards(len(self.log)), self._shards(), len(self.train_images.class_names))
            self.fabric.barrier()
            (place,) = optimizer["param_groups"][-1]["params"]
            optimizer["state"][place] = {"step": optimizer["state"][place]["step"]}
            loss = {}
        if not self.writes:
            return
        state = {
            "log": self.log,
            "model": self.model.state_dict(),
            "loss": loss,
            "optimizer": optimizer,
            "random_state": torch.get_rng_state(),
            "best": self.best,
            "scores": self.scores,
            "processes": self.fabric.world_size,
        }
        run.save_last(state)

    def _shards(self) -> dict[str, Tensor]:
        """The proxies here and Adam's moments of them: (classes here, N, D) each."""
        proxies = self.loss.proxies
        state = self.optimizer.state[proxies]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(proxies)
        return {"proxies": proxies.data, "exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}

    def _restore(self, checkpoint: dict) -> None:
        try:
            self.model.load_state_dict(checkpoint["model"])
            self.optimizer.load_state_dict(checkpoint["optimizer"])
            if not self.recipe.shard:
                self.loss.load_state_dict(checkpoint["loss"])
        except (RuntimeError, ValueError) as error:
            raise ValueError("the checkpoint does not fit recipe.json or the data: were they changed?") from error
        if self.recipe.shard:
            classes = len(self.train_images.class_names)
            load_shards(checkpoint["shards"], self._shards(), classes, checkpoint["processes"])
        before = checkpoint.get("processes", 1)
        if before != self.fabric.world_size:
            self.progress("processes", 0, 0, f"{self.fabric.world_size} instead of {before} go on with this run")
        torch.set_rng_state(checkpoint["random_state"])
        self.best, self.scores, self.log = checkpoint["best"], checkpoint["scores"], checkpoint["log"]


def _collate(items: list, crops: Dataset) -> list[Tensor]:
    """Images and labels as one tensor each; where there are none, of the same form without a row."""
    return default_collate(items) if items else [part[:0] for part in default_collate([crops[0]])]


def _keep_statistics(network: nn.Module) -> None:
    """Batch normalisation keeps its means and variances; its scale and shift still learn."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def _terms(loss: nn.Module, value: Tensor) -> Iterator[tuple[str, float]]:
    """The loss and, where it tells them, its parts, for the log."""
    yield "loss", value.item()
    terms = getattr(loss, "last_terms", None)
    for name, term in terms._asdict().items() if terms is not None else ():
        if term is not None:
            yield name, term.item()


def _held_out_note(log: list[dict]) -> str:
    if not log or "held_out" not in log[-1]:
        return ""
    recall, share = next(iter(log[-1]["held_out"].items()))
    return f" {recall.replace('recall', 'R')} {100 * share:.0f}%"


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def nobody_watches(what: str, done: int, total: int, note: str) -> None:
    pass
