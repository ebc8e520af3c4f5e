"""Training: `train(recipe, folder)` -> Run, and `resume(folder)`.

Order, crops and learning rates are functions of (seed, epoch, step), so that a run that was stopped and one that was
not go through the same numbers.
"""

import atexit
import re
import resource
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor

from proxygml import evaluation, plots
from proxygml.backbones import load_pretrained
from proxygml.data import ImageList
from proxygml.data.readable import readable_images
from proxygml.data.splits import hold_out
from proxygml.distributed.checkpoints import checksums
from proxygml.distributed.launch import LostOthersError
from proxygml.files import locked
from proxygml.training import build, features
from proxygml.training.evaluator import Evaluator
from proxygml.training.loop import TrainingLoop
from proxygml.training.recipe import Recipe
from proxygml.training.run import Progress, Run, no_progress, refuse_taken

OF_PROCESSES = re.compile("gloo|nccl|peer|socket|timed out|timeout|connection|distributed", re.I)  # of their connection
IN_CODE = re.compile(r"\[\S*/\S*\] *")  # the place in torch's own code that such errors begin with


def train(recipe: Recipe, folder: Path, *, progress: Progress | None = None) -> Run:
    """Train from the beginning in a new folder, which is made once images, network and loss are known to fit."""
    fabric = build.start_fabric(recipe)
    folder = Path(fabric.broadcast(str(folder)))
    refuse_taken(folder)
    trainer = Trainer(recipe, fabric, progress or no_progress, checkpoint=None)
    fabric.barrier()  # nobody looks any more whether the folder is taken
    with locked(folder) if fabric.is_global_zero else nullcontext():  # of several processes the first holds it for all
        if fabric.is_global_zero:
            Run.create(folder, recipe)
        trainer.progress("run folder", 0, 0, str(folder))
        return trainer.finish_together(Run(folder))


def resume(folder: Path, *, progress: Progress | None = None) -> Run:
    """Go on after the last finished epoch, to the end that an undisturbed run would have reached."""
    run = Run.open(Path(folder))
    fabric = build.start_fabric(run.recipe)
    with locked(run.folder) if fabric.is_global_zero else nullcontext():
        if fabric.is_global_zero:
            run.clear()
        checkpoint = run.load_last()
        expected = {"log": list, "scores": dict, "best": dict}
        if checkpoint is not None and not all(
            isinstance(checkpoint.get(name), kind) for name, kind in expected.items()
        ):
            raise ValueError(f"last.pt in {folder} is not the state of a run: remove it, and the run begins again")
        if run.recipe.shard and checkpoint is not None:
            checkpoint["shards"] = run.shards(len(checkpoint["log"]))
        return Trainer(run.recipe, fabric, progress or no_progress, checkpoint).finish_together(run)


class Trainer:
    """A run under way: its images, the network that learns from them, and what has been found so far.

    Of several processes the first one writes what is found.
    """

    def __init__(self, recipe: Recipe, fabric: Fabric, progress: Progress, checkpoint: dict | None) -> None:
        self.recipe, self.fabric = recipe, fabric
        self.writes = fabric.is_global_zero
        self.progress = progress = progress if self.writes else no_progress
        self.evaluator = Evaluator(recipe, fabric, progress)
        self.log: list[dict] = []
        self.best: dict[str, Any] = {}  # epoch, and map_at_r on what it was chosen on; none before the first epoch
        self.scores: dict = {}

        progress("loading images", 0, 1, recipe.dataset)
        train_images, self.test_images = build.load_images(recipe)
        model = build.build_model(recipe)  # before every image is decoded, which takes longer to fail
        if recipe.weights is not None and (checkpoint is None or recipe.feature_crops):
            progress("weights", 0, 0, load_pretrained(model.trunk, recipe.weights))
        train_images = self._usable(train_images, "training", model)
        if recipe.test or recipe.tested_epochs:
            self.test_images = self._usable(self.test_images, "test", model)
        train_images, self.held_out_images = hold_out(train_images, recipe.held_out)
        self.loop = TrainingLoop(recipe, fabric, model, train_images)
        if checkpoint is not None:
            self._restore(checkpoint)

    def finish_together(self, run: Run) -> Run:
        """`finish`, and where another process is gone, an error that says so and how to go on."""
        try:
            run = self.finish(run)
            if self.fabric.world_size > 1:
                atexit.register(_leave_the_others)
            return run
        except RuntimeError as error:
            if self.fabric.world_size == 1 or not OF_PROCESSES.search(str(error)):
                raise
            if not self.writes:  # the first speaks for all: it may still be waiting for this process
                leaving = threading.Thread(target=dist.destroy_process_group, daemon=True)
                leaving.start()
                leaving.join(1)  # it waits in its turn for a process that hangs
            reason = IN_CODE.sub("", str(error)).split(". ")[0].splitlines()[0]
            process = f"process {self.fabric.global_rank} of {self.fabric.world_size}"
            raise LostOthersError(
                f"{process} no longer reaches the others since {self.loop.position}: one has ended or hangs "
                f"({reason}). Go on with --resume {run.folder}"
            ) from error

    def finish(self, run: Run) -> Run:
        """Train the epochs that are left, score the best network on the test classes, draw the pictures."""
        if not self.log and self.recipe.baselines and self.recipe.test:
            self.scores |= self.evaluator.compare_with(self.loop.model, self.test_images)
        if self.best:
            self._mend_best(run)
        if self.writes:
            run.write_log(self.log)
        for epoch in range(len(self.log), self.recipe.epochs):
            self._train_and_judge(epoch, run)
        self.fabric.barrier()  # the best network is written
        self._take_best(run)
        trained: dict[str, Any] = {}
        if self.recipe.test:
            embeddings = self.evaluator.embed(self.loop.model, self.test_images, "scoring test classes")
            trained["trained"] = self.evaluator.evaluate(embeddings, cluster=True).to_json()
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
        if not self.recipe.test:
            return run
        vectors, labels = embeddings.vectors, embeddings.labels
        plots.draw_retrieval(self.test_images.open, vectors, labels, run.folder / "retrieval.png")
        plots.draw_map(vectors, labels, self.test_images.class_names, run.folder / "map.png")
        return run

    def _mend_best(self, run: Run) -> None:
        """Before a run goes on: where best.pt is damaged or older than the best epoch, it is written if it can be."""
        try:
            epoch = run.load_best()["epoch"]
        except (ValueError, FileNotFoundError):
            epoch = 0
        if epoch == self.best["epoch"] or epoch > len(self.log):  # of an epoch that is now trained again
            return
        if self.best["epoch"] != len(self.log):
            run.refuse_best(self.best["epoch"])
        self._save_best(run)

    def _take_best(self, run: Run) -> None:
        """The weights of the best epoch."""
        state = run.load_best()
        if state["epoch"] != self.best["epoch"]:
            run.refuse_best(self.best["epoch"])
        self.loop.model.load_state_dict(state["model"])

    def _save_best(self, run: Run) -> None:
        if self.writes:
            run.save_best(self.loop.weights() | {"epoch": self.best["epoch"]})

    def _train_and_judge(self, epoch: int, run: Run) -> None:
        """One epoch, its entry in the log, and its checkpoint."""
        started = time.perf_counter()
        means = self.loop.train_epoch(epoch, embed=self._embed_training_images, progress=self._trained)
        entry: dict[str, Any] = {"epoch": epoch + 1} | means
        entry["training_seconds"] = time.perf_counter() - started
        entry["images_per_second"] = len(self.loop.images) / entry["training_seconds"]
        entry["peak_memory_mb"] = _peak_memory_mb(self.fabric.device)
        verdict = None
        if self.held_out_images is not None:
            model, what = self.loop.model, "scoring held-out classes"
            verdict = self.evaluator.score(model, self.held_out_images, what, cluster=False)
            entry["held_out"] = verdict.to_json()
        tested = self.recipe.tested_epochs
        if epoch + 1 in tested or (tested and epoch + 1 == self.recipe.epochs):
            test_scores = self._test()
            entry["test"] = test_scores.to_json()
            verdict = verdict or test_scores
        entry["seconds"] = time.perf_counter() - started
        is_best = self._is_best(verdict)
        if is_best:
            self.best = {"epoch": epoch + 1, "map_at_r": None if verdict is None else verdict.map_at_r}
        self.log.append(entry)
        if self.writes:
            run.write_log(self.log)
        self._save_last(run)
        if is_best:  # after the checkpoint, of which a run that is stopped in between makes it again
            self._save_best(run)

    def _test(self) -> evaluation.Scores:
        """The test classes as they are found now, and clustered too where they are found better than ever before."""
        embeddings = self.evaluator.embed(self.loop.model, self.test_images, "scoring test classes")
        scores = self.evaluator.evaluate(embeddings, cluster=False)
        if self.recipe.keep_epoch == "last":
            return scores
        first = self.recipe.recall_at[0]
        highest = max((entry["test"][f"recall@{first}"] for entry in self.log if "test" in entry), default=-1)
        return self.evaluator.evaluate(embeddings, cluster=True) if scores.recall[first] > highest else scores

    def _is_best(self, verdict: evaluation.Scores | None) -> bool:
        """Whether the newest epoch is the best so far; where none is ever judged, the newest always is."""
        so_far = self.best.get("map_at_r")
        if verdict is None or self.recipe.keep_epoch == "last":
            return so_far is None or self.recipe.keep_epoch == "last"
        return so_far is None or verdict.map_at_r > so_far

    def _trained(self, step: int, steps: int, loss: float) -> None:
        epoch = f"epoch {len(self.log) + 1}/{self.recipe.epochs}"
        self.progress("training", step, steps, f"{epoch} loss {loss:.2f}{_held_out_note(self.log)}")

    def _embed_training_images(self) -> tuple[Tensor, Tensor]:
        """Embeddings (M, D) of the training images as they are, not augmented, and their labels (M,)."""
        embeddings = self.evaluator.embed(self.loop.model, self.loop.images, "embedding training images")
        device = self.fabric.device
        return torch.from_numpy(embeddings.vectors).to(device), torch.from_numpy(embeddings.labels).to(device)

    def _usable(self, images: ImageList, what: str, model: build.Network) -> ImageList:
        """The images that can be read, and their features where the network below the head is frozen."""

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
        if broken := len(images) - len(kept):
            self.progress("skipped", 0, 0, f"{broken} of {len(images)} {what} images that cannot be read")
            self.scores[f"skipped_{what}_images"] = broken
        return kept

    def _save_last(self, run: Run) -> None:
        """The first process writes everything but proxies that are spread, of which each writes its own before."""
        found = {"log": self.log, "best": self.best, "scores": self.scores}
        if self.recipe.shard:
            run.clear_shards(len(self.log), self.writes)
            self.fabric.barrier()
            self.loop.save_shards(run.shards(len(self.log)))
            self.fabric.barrier()
            found["shard_checksums"] = checksums(run.shards(len(self.log))) if self.writes else {}
        if self.writes:
            run.save_last(self.loop.state() | found)

    def _restore(self, checkpoint: dict) -> None:
        self.loop.restore(checkpoint)
        before = checkpoint.get("processes", 1)
        if before != self.fabric.world_size:
            self.progress("processes", 0, 0, f"{self.fabric.world_size} instead of {before} go on with this run")
        self.best, self.scores, self.log = checkpoint["best"], checkpoint["scores"], checkpoint["log"]


def _leave_the_others() -> None:
    """Before Python ends: a process whose threads of gloo outlived it was seen to abort after all was done."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _held_out_note(log: list[dict]) -> str:
    if not log or "held_out" not in log[-1]:
        return ""
    recall, share = next(iter(log[-1]["held_out"].items()))
    return f" {recall.replace('recall', 'R')} {100 * share:.0f}%"


def _peak_memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
