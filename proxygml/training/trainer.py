"""Trainer: trains the epochs of a run that are left, keeps the best network and scores it.

Order, crops and learning rates are functions of (seed, epoch, step), so a resumed run computes the same numbers as an
uninterrupted one.
"""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from torch import Tensor, nn

from proxygml import evaluation, plots
from proxygml.backbones import load_pretrained
from proxygml.data import ImageList
from proxygml.data.splits import MIN_HELD_OUT, hold_out
from proxygml.display import Progress, counted, no_progress
from proxygml.distributed.checkpoints import checksums
from proxygml.evaluation.intervals import difference_interval
from proxygml.training import build
from proxygml.training.evaluator import Evaluator, nearest_images
from proxygml.training.features import prepare_images
from proxygml.training.initialization import start_from_images
from proxygml.training.loggers import Loggers
from proxygml.training.loop import TrainingLoop
from proxygml.training.parts import Parts
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run
from proxygml.training.summary import describe_choice, describe_epoch

Callback = Callable[[dict, nn.Module], bool | None]  # log entry of an epoch, network -> whether to stop


class Trainer:
    """A run in progress: images, training loop, log and scores. The first of several processes writes the files."""

    def __init__(
        self,
        recipe: Recipe,
        fabric: Fabric,
        progress: Progress,
        checkpoint: dict | None,
        parts: Parts,
        loggers: Loggers,
        callbacks: Sequence[Callback],
    ) -> None:
        for callback in callbacks:
            if not callable(callback):
                raise ValueError(f"expected callbacks as functions of (entry, network), got {type(callback).__name__}")
        self.recipe, self.fabric, self.loggers, self.callbacks = recipe, fabric, loggers, callbacks
        self.writes = fabric.is_global_zero
        self.progress = progress = progress if self.writes else no_progress
        self.evaluator = Evaluator(recipe, fabric, progress)
        self.log: list[dict] = []
        self.best: dict[str, Any] = {}  # epoch (0: before the first), its map_at_r; empty before training
        self.scores: dict = {}
        self.baseline_hits: Tensor | None = None  # (M,): whether the network before training finds each test image
        self.baseline_nearest: Tensor | None = None  # (M, 5): the images it finds, if it is pretrained

        progress("loading images", 0, 1, recipe.dataset)
        train_images, self.test_images = build.load_images(recipe, parts.data, progress)
        self.tests = recipe.test and len(self.test_images) > 0
        if recipe.tested_epochs and not self.test_images:
            raise ValueError("tested_epochs needs test classes, and test_fraction 0 leaves none: change one of them")
        model = build.build_model(recipe, parts.network)  # fails sooner than decoding every image
        features = model.trunk.channels
        if recipe.head_start == "fitted" and len(train_images) < recipe.embedding_dim < features:
            few = f"{len(train_images)} training images cannot tell which {recipe.embedding_dim} matter"
            progress("dimensions", 0, 0, f"{features:,}, those of the features: {few}")
            recipe = self.recipe = recipe.changed({"embedding_dim": features})
            model = build.build_model(recipe, parts.network)
        if recipe.weights is not None and (checkpoint is None or recipe.feature_crops):
            progress("weights", 0, 0, load_pretrained(model.trunk, recipe.weights))
        train_images = self._usable(train_images, "training", model)
        if self.tests or recipe.tested_epochs:
            self.test_images = self._usable(self.test_images, "test", model)
            if len(self.test_images) < 2:
                raise ValueError("expected at least two images to test on, got one: add images, or set test_fraction 0")
        held_out = recipe.held_out if self.test_images else 0.0  # without test classes, all are trained
        train_images, self.held_out_images = hold_out(train_images, held_out)
        if recipe.held_out and self.held_out_images is None:
            count = len(train_images.class_names)
            few = f"{recipe.held_out:g} of {count} classes is fewer than {MIN_HELD_OUT}"
            reason = few if self.test_images else "no classes to test on"
            note = f"none, {reason}: all {count} are trained, and the last epoch is kept"
            progress("held-out classes", 0, 0, note)
        self.shared_classes = len(set(train_images.class_names) & set(self.test_images.class_names))
        loss = build.build_loss(recipe, len(train_images.class_names), parts.loss)
        self.loop = TrainingLoop(recipe, fabric, model, loss, train_images)
        if checkpoint is not None:
            self._restore(checkpoint)

    def finish(self, run: Run) -> Run:
        """Train the remaining epochs, score the best network on the test classes, draw the plots."""
        if self.best:
            self._repair_best(run)
        else:
            self._begin(run)
        if self.writes:
            run.write_log(self.log)
            if len(self.log) < self.recipe.epochs:  # of fewer epochs, if the run was finished
                (run.folder / "scores.json").unlink(missing_ok=True)
        for epoch in range(len(self.log), self.recipe.epochs):
            if self._run_epoch(epoch, run):
                self.progress("stopped", 0, 0, f"after epoch {epoch + 1}, by a callback")
                break
        self.fabric.barrier()  # model.safetensors has been written
        trained: dict[str, Any] = {"epoch_chosen_by": self._choice}
        if self.tests and self.best["epoch"] < len(self.log):
            model, what = self.loop.model, "scoring the last epoch"
            last = self.evaluator.score(model, self.test_images, what, cluster=False)
            trained["last_epoch"] = last.to_json()
        self._load_best(run)
        if self.tests:
            embeddings = self.evaluator.embed(self.loop.model, self.test_images, "scoring test classes")
            scored = self.evaluator.evaluate(embeddings, self.test_images, cluster=True)
            trained["trained"] = scored.to_json()
            if self.recipe.nested:
                trained["nested"] = self.evaluator.score_prefixes(embeddings, self.test_images)
            if self.baseline_hits is not None and scored.hits is not None:
                trained["gain"] = difference_interval(scored.hits, self.baseline_hits.numpy())
            if self.shared_classes:
                trained["shared_classes"] = self.shared_classes
        if self.held_out_images is not None:
            best = self.best["epoch"]
            trained["held_out"] = self.log[best - 1]["held_out"] if best else self.scores["start"]["held_out"]
        if not self.writes:
            return run
        trained |= build.remarks(self.recipe)
        seconds = self.scores["start"]["seconds"] + sum(entry["seconds"] for entry in self.log)
        skipped = sum(entry.get("skipped_steps", 0) for entry in self.log)
        if skipped:
            trained["skipped_steps"] = skipped
            self.progress("skipped", 0, 0, f"{counted(skipped, 'step')} with a gradient that was not finite")
        scores = trained | self.scores | {"best_epoch": self.best["epoch"], "seconds": seconds}
        run.write_scores(scores)
        self.progress("drawing pictures", 0, 1, "")
        plots.draw_curves([{"epoch": 0} | self.scores["start"], *self.log], run.folder / "curves.png")
        if self.tests:
            images, vectors = self.test_images, embeddings.vectors
            queries, names = images.queries, (images.labels, images.class_names)
            nearest = nearest_images(vectors, queries)
            plots.draw_retrieval(images.open, nearest, *names, run.folder / "retrieval.png", queries=queries)
            if self.baseline_nearest is not None:
                path, before = run.folder / "before_after.png", self.baseline_nearest.numpy()
                plots.draw_before_after(images.open, before, nearest, *names, path, queries=queries)
            plots.draw_map(vectors, *names, run.folder / "map.png")
        self.loggers.log({name: value for name, value in scores.items() if name != "held_out"}, len(self.log))
        self.loggers.finish(run.folder, len(self.log))
        return run

    def _begin(self, run: Run) -> None:
        """Before the first epoch: score the baselines, initialize head and proxies, score a pretrained network."""
        recipe, model = self.recipe, self.loop.model
        if recipe.baselines and self.tests:
            baselines, nearest = self.evaluator.compare_with(model, self.test_images)
            self.scores |= {name: scores.to_json() for name, scores in baselines.items()}
            self.baseline_hits = torch.from_numpy(baselines["untrained"].hits)
            self.baseline_nearest = torch.from_numpy(nearest.astype(np.int32)) if recipe.pretrained else None
        started = time.perf_counter()
        start_from_images(self.loop, self.evaluator, self.progress)
        start: dict[str, Any] = {}
        if recipe.pretrained and self.held_out_images is not None:
            start["held_out"] = self._score_held_out()
            self.progress("before training", 0, 0, ", ".join(describe_choice(recipe, start)))
        self.scores["start"] = start | {"seconds": time.perf_counter() - started}
        if start or not recipe.epochs:
            self.best = {"epoch": 0, "map_at_r": start.get("held_out", {}).get("map_at_r")}
            if not recipe.shard:  # Adam has no state to shard before its first step
                self._save_last(run)
            self._save_best(run)

    def _score_held_out(self) -> dict:
        assert self.held_out_images is not None
        what = "scoring held-out classes"
        return self.evaluator.score(self.loop.model, self.held_out_images, what, cluster=False).to_json()

    def _repair_best(self, run: Run) -> None:
        """Before resuming: write the best weights again if they are damaged or outdated and those of the last epoch."""
        try:
            epoch = run.load_best()["epoch"]
        except (ValueError, FileNotFoundError):
            epoch = -1
        if epoch == self.best["epoch"] or epoch > len(self.log):  # that epoch is trained again
            return
        if self.best["epoch"] != len(self.log):
            run.raise_best_lost(self.best["epoch"])
        self._save_best(run)

    def _load_best(self, run: Run) -> None:
        """Load the weights of the best epoch."""
        state = run.load_best()
        if state["epoch"] != self.best["epoch"]:
            run.raise_best_lost(self.best["epoch"])
        self.loop.model.load_state_dict(state["model"])

    def _save_best(self, run: Run) -> None:
        if self.writes:
            classes = list(self.loop.images.class_names)
            run.save_best(self.loop.weights() | {"epoch": self.best["epoch"], "class_names": classes})

    def _run_epoch(self, epoch: int, run: Run) -> bool:
        """Train and score one epoch; write its log entry and checkpoint. Returns whether a callback ends training."""
        started = time.perf_counter()
        means = self.loop.train_epoch(epoch, embed=self._embed_training_images, progress=self._report_step)
        entry: dict[str, Any] = {"epoch": epoch + 1} | means
        entry["training_seconds"] = time.perf_counter() - started
        entry["images_per_second"] = len(self.loop.images) / entry["training_seconds"]
        entry["peak_memory_mb"] = _peak_memory_mb(self.fabric.device)
        if self.held_out_images is not None:
            entry["held_out"] = self._score_held_out()
        tested = self.recipe.tested_epochs
        if epoch + 1 in tested or (tested and epoch + 1 == self.recipe.epochs):
            entry["test"] = self._test().to_json()
        entry["seconds"] = time.perf_counter() - started
        map_at_r = entry.get(self._choice or "", {}).get("map_at_r")
        keeps_last = self.recipe.keep_epoch == "last"
        so_far = (self.scores["start"].get("held_out", {}) if keeps_last else self.best).get("map_at_r")
        is_best = self._choice is None or so_far is None or (map_at_r is not None and map_at_r > so_far)
        if is_best:
            self.best = {"epoch": epoch + 1, "map_at_r": map_at_r}
        self.log.append(entry)
        self.progress(f"epoch {epoch + 1}/{self.recipe.epochs}", 0, 0, describe_epoch(self.recipe, entry))
        if self.writes:
            run.write_log(self.log)
        self._save_last(run)
        if is_best:  # last: if interrupted before it, `resume` writes it from the checkpoint
            self._save_best(run)
        if self.writes:
            self.loggers.log(entry, epoch + 1)
        stops = [callback(entry, self.loop.model) for callback in self.callbacks]  # all are called
        return self.fabric.broadcast(any(stop is True for stop in stops))

    def _test(self) -> evaluation.Scores:
        """Scores on the test classes; with clustering if Recall@n is the highest so far."""
        embeddings = self.evaluator.embed(self.loop.model, self.test_images, "scoring test classes")
        scores = self.evaluator.evaluate(embeddings, self.test_images, cluster=False)
        if self.recipe.keep_epoch == "last":
            return scores
        first = self.recipe.recall_at[0]
        highest = max((entry["test"][f"recall@{first}"] for entry in self.log if "test" in entry), default=-1)
        if scores.recall[first] <= highest:
            return scores
        return self.evaluator.evaluate(embeddings, self.test_images, cluster=True)

    @property
    def _choice(self) -> str | None:
        """Which scores in the log choose the epoch to keep, by MAP@R; None keeps the last epoch."""
        keeps_last = self.recipe.keep_epoch == "last"
        if self.held_out_images is not None and (self.recipe.pretrained or not keeps_last):
            return "held_out"
        return "test" if self.recipe.tested_epochs and not (keeps_last or self.recipe.held_out) else None

    def _report_step(self, step: int, steps: int, loss: float) -> None:
        self.progress("training", step, steps, f"epoch {len(self.log) + 1}/{self.recipe.epochs} loss {loss:.2f}")

    def _embed_training_images(self) -> tuple[Tensor, Tensor]:
        """Embeddings (M, D) of the training images without augmentation, and labels (M,)."""
        embeddings = self.evaluator.embed(self.loop.model, self.loop.images, "embedding training images")
        device = self.fabric.device
        return torch.from_numpy(embeddings.vectors).to(device), torch.from_numpy(embeddings.labels).to(device)

    def _usable(self, images: ImageList, what: str, model: build.Network) -> ImageList:
        """The readable images, with features if only the head is trained; the number of others goes to the scores."""
        kept = prepare_images(images, what, self.recipe, model, self.progress)
        if len(kept) < len(images):
            self.scores[f"skipped_{what}_images"] = len(images) - len(kept)
        return kept

    def _save_last(self, run: Run) -> None:
        """Write last.pt, after each process has written its shard of the proxies."""
        results: dict[str, Any] = {
            "log": self.log,
            "best": self.best,
            "scores": self.scores,
            "recipe": asdict(self.recipe),
            "baseline_hits": self.baseline_hits,
            "baseline_nearest": self.baseline_nearest,
        }
        if self.recipe.shard:
            if self.writes:
                run.clear_shards(len(self.log))
            self.fabric.barrier()
            self.loop.save_shards(run.shards(len(self.log)))
            self.fabric.barrier()
            results["shard_checksums"] = checksums(run.shards(len(self.log))) if self.writes else {}
        if self.writes:
            run.save_last(self.loop.state() | results)

    def _restore(self, checkpoint: dict) -> None:
        self.loop.restore(checkpoint)
        before = checkpoint.get("processes", 1)
        if before != self.fabric.world_size:
            self.progress("processes", 0, 0, f"{self.fabric.world_size} now, {before} before")
        self.best, self.scores, self.log = checkpoint["best"], checkpoint["scores"], checkpoint["log"]
        self.baseline_hits = checkpoint.get("baseline_hits")
        self.baseline_nearest = checkpoint.get("baseline_nearest")


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
