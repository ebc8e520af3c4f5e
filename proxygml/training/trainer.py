"""Training: `train(recipe, out)` -> Run, and `resume(folder)`.

Order, crops and learning rates are functions of (seed, epoch, step), so a resumed run computes the same numbers as an
uninterrupted one.
"""

import atexit
import re
import resource
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor, nn

from proxygml import evaluation, plots
from proxygml.backbones import load_pretrained
from proxygml.data import ImageList
from proxygml.data.readable import describe_skipped, readable_images
from proxygml.data.splits import MIN_HELD_OUT, hold_out
from proxygml.display import Progress, no_progress, show_progress
from proxygml.distributed.checkpoints import checksums
from proxygml.distributed.launch import LostProcessError
from proxygml.files import locked
from proxygml.training import build, features
from proxygml.training.evaluator import Evaluator
from proxygml.training.loggers import Logger, Loggers
from proxygml.training.loop import TrainingLoop
from proxygml.training.parts import Parts
from proxygml.training.recipe import Recipe
from proxygml.training.resuming import check_changes
from proxygml.training.run import Run, require_empty
from proxygml.training.summary import show_result

# NCCL raises a DistError; gloo raises a plain RuntimeError for a lost peer, so only its text can tell.
CONNECTION_ERROR = re.compile("gloo|nccl|peer|socket|timed out|timeout|connection|distributed", re.I)
SOURCE_LINE = re.compile(r"\[\S*/\S*\] *")  # of gloo's code, at the start of its messages


Callback = Callable[[dict, nn.Module], bool | None]  # log entry of an epoch, network -> whether to stop


def train(
    recipe: Recipe | str,
    out: str | Path,
    *,
    network: nn.Module | None = None,
    data: Any = None,
    loss: nn.Module | Callable[..., nn.Module] | None = None,
    loggers: Sequence[Logger] = (),
    callbacks: Sequence[Callback] = (),
    progress: bool | Progress = True,
) -> Run:
    """Train by a recipe, or the preset of this name, in a new folder; returns the finished run.

    Objects replace what the recipe names (docs/extend.md): `network` turns images into features, `data` is an
    ImageList, a Dataset of (image, label), arrays or a frame, or these by split; `loss` is a module
    `loss(embeddings, labels)`, or a class that makes one from num_classes and embedding_dim. `loggers` receive the
    scores of every epoch and the pictures. Each callback is called with the log entry of an epoch and the network;
    training ends early when one returns True. `progress` shows bars and the scores, or receives
    (activity, done, total, note). The folder is created after images, network and loss have been checked.
    """
    parts = Parts(network, data, loss)
    recipe = parts.name_in(Recipe.preset(recipe) if isinstance(recipe, str) else recipe).with_absolute_paths()
    parts.require(recipe)
    hooks = Loggers(loggers), tuple(callbacks)
    with _shown(progress) as report:
        fabric = build.start_fabric(recipe)
        folder = Path(fabric.broadcast(str(out)))
        require_empty(folder)
        trainer = Trainer(recipe, fabric, report, None, parts, *hooks)
        fabric.barrier()  # all processes have checked the folder
        with locked(folder) if fabric.is_global_zero else nullcontext():  # the first process locks for all
            if fabric.is_global_zero:
                Run.create(folder, recipe)
            trainer.progress("run folder", 0, 0, str(folder))
            run = trainer.finish_or_explain(Run(folder))
    if progress is True and trainer.writes:
        show_result(recipe, run.scores)
    return run


def resume(
    folder: str | Path,
    recipe: Recipe | None = None,
    *,
    network: nn.Module | None = None,
    data: Any = None,
    loss: nn.Module | Callable[..., nn.Module] | None = None,
    loggers: Sequence[Logger] = (),
    callbacks: Sequence[Callback] = (),
    progress: bool | Progress = True,
) -> Run:
    """Continue after the last finished epoch; the result is bit-identical to that of an uninterrupted run.

    `recipe` may change the settings in `resuming.CHANGEABLE`; other changes are an error. Objects that were passed to
    `train` are passed again.
    """
    parts, hooks = Parts(network, data, loss), (Loggers(loggers), tuple(callbacks))
    run = Run.open(folder)
    with _shown(progress) as report:
        trainer = _continue(run, (recipe or run.recipe).with_absolute_paths(), parts, *hooks, report)
    if progress is True and trainer.writes:
        show_result(run.recipe, run.scores)
    return run


@contextmanager
def _shown(progress: bool | Progress) -> Iterator[Progress]:
    """The callback that reports progress."""
    if callable(progress):
        yield progress
    elif progress:
        with show_progress() as report:
            yield report
    else:
        yield no_progress


def _continue(
    run: Run, recipe: Recipe, parts: Parts, loggers: Loggers, callbacks: Sequence[Callback], progress: Progress
) -> "Trainer":
    """Train the remaining epochs of a run."""
    parts.require(recipe)
    build.require_data(recipe, run.folder)
    here = recipe
    if build.find_device(recipe.device) is None:
        warnings.warn(f"this machine has no {recipe.device}: continuing on the CPU", stacklevel=2)
        here = recipe.changed({"device": "cpu"})
    fabric = build.start_fabric(here)
    progress = progress if fabric.is_global_zero else no_progress
    with locked(run.folder) if fabric.is_global_zero else nullcontext():
        if fabric.is_global_zero:
            run.clear()
            checkpoint = run.load_last()
        fabric.barrier()  # the first process has moved a damaged checkpoint away
        if not fabric.is_global_zero:
            checkpoint = run.load_last()
        expected = {"log": list, "scores": dict, "best": dict}
        if checkpoint is not None and not all(
            isinstance(checkpoint.get(name), kind) for name, kind in expected.items()
        ):
            raise ValueError(f"last.pt in {run.folder} is not the state of a run: remove it to start the run again")
        if checkpoint is not None:
            check_changes(recipe, checkpoint, progress)
        if recipe.shard and checkpoint is not None:
            checkpoint["shards"] = run.shards(len(checkpoint["log"]))
        trainer = Trainer(here, fabric, progress, checkpoint, parts, loggers, callbacks)
        if fabric.is_global_zero and recipe != run.recipe:
            run.write_recipe(recipe)
        trainer.finish_or_explain(run)
        return trainer


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
        self.recipe, self.fabric, self.loggers, self.callbacks = recipe, fabric, loggers, callbacks
        self.writes = fabric.is_global_zero
        self.progress = progress = progress if self.writes else no_progress
        self.evaluator = Evaluator(recipe, fabric, progress)
        self.log: list[dict] = []
        self.best: dict[str, Any] = {}  # epoch and its map_at_r; empty before the first epoch
        self.scores: dict = {}

        progress("loading images", 0, 1, recipe.dataset)
        train_images, self.test_images = build.load_images(recipe, parts.data, progress)
        self.tests = recipe.test and len(self.test_images) > 0
        if recipe.tested_epochs and not self.test_images:
            raise ValueError("tested_epochs needs test classes, and test_fraction 0 leaves none: change one of them")
        model = build.build_model(recipe, parts.network)  # fails sooner than decoding every image
        if recipe.weights is not None and (checkpoint is None or recipe.feature_crops):
            progress("weights", 0, 0, load_pretrained(model.trunk, recipe.weights))
        train_images = self._prepare_images(train_images, "training", model)
        if self.tests or recipe.tested_epochs:
            self.test_images = self._prepare_images(self.test_images, "test", model)
        train_images, self.held_out_images = hold_out(train_images, recipe.held_out)
        if recipe.held_out and self.held_out_images is None:
            count = len(train_images.class_names)
            note = f"none, {recipe.held_out:g} of {count} classes is fewer than {MIN_HELD_OUT}: all are trained"
            progress("held-out classes", 0, 0, f"{note}, and the last epoch is kept")
        loss = build.build_loss(recipe, len(train_images.class_names), parts.loss)
        self.loop = TrainingLoop(recipe, fabric, model, loss, train_images)
        if checkpoint is not None:
            self._restore(checkpoint)

    def finish_or_explain(self, run: Run) -> Run:
        """`finish`, with a clear error if another process has ended or hangs."""
        try:
            run = self.finish(run)
            if self.fabric.world_size > 1:
                atexit.register(_destroy_process_group)
            return run
        except RuntimeError as error:
            if self.fabric.world_size == 1 or not _is_connection_error(error):
                raise
            if not self.writes:  # the first process reports the error, and may still be waiting for this one
                thread = threading.Thread(target=dist.destroy_process_group, daemon=True)
                thread.start()
                thread.join(1)  # it would block if another process hangs
            reason = SOURCE_LINE.sub("", str(error)).split(". ")[0].splitlines()[0]
            process = f"process {self.fabric.global_rank} of {self.fabric.world_size}"
            raise LostProcessError(
                f"{process} lost the connection to the others at {self.loop.position}: one has ended or hangs "
                f"({reason}). Continue with --resume {run.folder}"
            ) from error

    def finish(self, run: Run) -> Run:
        """Train the remaining epochs, score the best network on the test classes, draw the plots."""
        if not self.log and self.recipe.baselines and self.tests:
            self.scores |= self.evaluator.compare_with(self.loop.model, self.test_images)
        if self.best:
            self._repair_best(run)
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
            trained["trained"] = self.evaluator.evaluate(embeddings, self.test_images, cluster=True).to_json()
        if self.held_out_images is not None:
            trained["held_out"] = self.log[self.best["epoch"] - 1]["held_out"]
        if not self.writes:
            return run
        trained |= build.remarks(self.recipe)
        seconds = sum(entry["seconds"] for entry in self.log)
        skipped = sum(entry.get("skipped_steps", 0) for entry in self.log)
        if skipped:
            trained["skipped_steps"] = skipped
            self.progress("skipped", 0, 0, f"{skipped} steps whose gradient was not finite")
        run.write_scores(trained | self.scores | {"best_epoch": self.best["epoch"], "seconds": seconds})
        self.progress("drawing pictures", 0, 1, "")
        plots.draw_curves(self.log, run.folder / "curves.png")
        if self.tests:
            vectors, labels = embeddings.vectors, embeddings.labels
            plots.draw_retrieval(self.test_images.open, vectors, labels, run.folder / "retrieval.png")
            plots.draw_map(vectors, labels, self.test_images.class_names, run.folder / "map.png")
        self.loggers.log_pictures(run.folder, self.best["epoch"])
        self.loggers.finish()
        return run

    def _repair_best(self, run: Run) -> None:
        """Before resuming: write the best weights again if they are damaged or outdated and those of the last epoch."""
        try:
            epoch = run.load_best()["epoch"]
        except (ValueError, FileNotFoundError):
            epoch = 0
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
            model, what = self.loop.model, "scoring held-out classes"
            entry["held_out"] = self.evaluator.score(model, self.held_out_images, what, cluster=False).to_json()
        tested = self.recipe.tested_epochs
        if epoch + 1 in tested or (tested and epoch + 1 == self.recipe.epochs):
            entry["test"] = self._test().to_json()
        entry["seconds"] = time.perf_counter() - started
        map_at_r = entry.get(self._choice or "", {}).get("map_at_r")
        so_far = self.best.get("map_at_r")
        is_best = self._choice is None or so_far is None or (map_at_r is not None and map_at_r > so_far)
        if is_best:
            self.best = {"epoch": epoch + 1, "map_at_r": map_at_r}
        self.log.append(entry)
        self.progress(f"epoch {epoch + 1}/{self.recipe.epochs}", 0, 0, self._describe(entry))
        if self.writes:
            run.write_log(self.log)
        self._save_last(run)
        if is_best:  # last: if interrupted before it, `resume` writes it from the checkpoint
            self._save_best(run)
        if self.writes:
            self.loggers.log_epoch(entry)
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
        """Which scores in the log choose the best epoch, by MAP@R; None keeps the last epoch."""
        if self.recipe.keep_epoch == "last":
            return None
        if self.held_out_images is not None:
            return "held_out"
        return "test" if self.recipe.tested_epochs and not self.recipe.held_out else None

    def _report_step(self, step: int, steps: int, loss: float) -> None:
        self.progress("training", step, steps, f"epoch {len(self.log) + 1}/{self.recipe.epochs} loss {loss:.2f}")

    def _describe(self, entry: dict) -> str:
        """Loss, scores, speed and time left after an epoch."""
        n = self.recipe.recall_at[0]
        shown = "".join(
            f", {name.replace('_', '-')} R@{n} {100 * entry[name][f'recall@{n}']:.1f}, "
            f"MAP@R {100 * entry[name]['map_at_r']:.1f}"
            for name in ("held_out", "test")
            if name in entry
        )
        left = timedelta(seconds=round(entry["seconds"] * (self.recipe.epochs - entry["epoch"])))
        return f"loss {entry['loss']:.3f}{shown}, {entry['images_per_second']:.0f} images/s, {left} left"

    def _embed_training_images(self) -> tuple[Tensor, Tensor]:
        """Embeddings (M, D) of the training images without augmentation, and labels (M,)."""
        embeddings = self.evaluator.embed(self.loop.model, self.loop.images, "embedding training images")
        device = self.fabric.device
        return torch.from_numpy(embeddings.vectors).to(device), torch.from_numpy(embeddings.labels).to(device)

    def _prepare_images(self, images: ImageList, what: str, model: build.Network) -> ImageList:
        """The readable images, with features if only the head is trained."""

        def checked(done: int, total: int) -> None:
            self.progress(f"checking {what} images", done, total, "")

        def computed(done: int, total: int) -> None:
            self.progress(f"features of {what} images", done, total, "")

        if self.recipe.feature_crops:
            crops = self.recipe.feature_crops if what == "training" else 0
            kept = features.with_features(images, self.recipe, model, crops, checked, computed)
        else:
            kept = readable_images(
                images,
                skip_broken=self.recipe.skip_broken,
                cache=build.training_cache(self.recipe) if what == "training" else None,
                max_bytes=int(self.recipe.cache_gigabytes * 2**30),
                sample=True,
                progress=checked,
            )
        if skipped := describe_skipped(images, kept):
            self.progress(f"skipped in {what}", 0, 0, skipped)
            self.scores[f"skipped_{what}_images"] = len(images) - len(kept)
        return kept

    def _save_last(self, run: Run) -> None:
        """Write last.pt, after each process has written its shard of the proxies."""
        results = {"log": self.log, "best": self.best, "scores": self.scores, "recipe": asdict(self.recipe)}
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


def _is_connection_error(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or CONNECTION_ERROR.search(str(error)) is not None


def _destroy_process_group() -> None:
    """At exit: gloo threads that outlive the interpreter were seen to abort a finished process."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
