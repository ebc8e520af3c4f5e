"""Training: what is trained, what is chosen, and that a stopped run goes on as if it had not been."""

import itertools
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning_fabric import seed_everything
from PIL import Image

from proxygml.cli.display import show_run
from proxygml.data.cache import Cache
from proxygml.data.splits import hold_out
from proxygml.embeddings import embed
from proxygml.evaluation import evaluate
from proxygml.model import Model
from proxygml.paper import running
from proxygml.training import build, evaluator, loop, monitor, start
from proxygml.training.build import load_images, load_model
from proxygml.training.checkpoints import load_checkpoint, load_weights
from proxygml.training.loop import learning_rate_factor, scheduled_links
from proxygml.training.presets import GLYPHS
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run
from proxygml.training.start import resume, train


def same_weights(left: Path, right: Path) -> None:
    """Everything that training changes is equal to the last bit: network, proxies, optimizer, random state."""

    def compare(a: object, b: object, where: str) -> None:
        if isinstance(a, torch.Tensor):
            assert torch.equal(a, b), where
        elif isinstance(a, dict):
            assert a.keys() == b.keys(), where
            for key in a:
                compare(a[key], b[key], f"{where}.{key}")
        elif isinstance(a, list):
            assert len(a) == len(b), where
            for index, (one, other) in enumerate(zip(a, b, strict=True)):
                compare(one, other, f"{where}[{index}]")
        else:
            assert a == b, where

    load = load_weights if left.suffix == ".safetensors" else load_checkpoint
    left_state, right_state = load(left), load(right)
    for state in (left_state, right_state):
        state.pop("log", None)  # has times in it
        state.get("scores", {}).get("start", {}).pop("seconds", None)
        state.pop("recipe", None)
    compare(left_state, right_state, "checkpoint")


class PlugPulledError(Exception):
    """Somebody pulled the plug."""


def stop_at(step: int):
    """A progress callback that ends the run at this training step."""

    def progress(what: str, done: int, total: int, note: str) -> None:
        if what == "training" and done == step:
            raise PlugPulledError

    return progress


def test_a_finished_run_has_everything_in_its_folder(trained_run: Run) -> None:
    names = {path.name for path in trained_run.folder.iterdir()} - {
        "index",
        "index-train",
    }  # of searches in other tests
    expected = {"recipe.json", "log.jsonl", "last.pt", "previous.pt", "model.safetensors", "scores.json"}
    assert names == expected | {".lock", "curves.png", "retrieval.png", "map.png"}
    for entry in trained_run.log:
        assert {"epoch", "loss", "sample_loss", "proxy_loss", "unlinked_fraction", "held_out"} <= entry.keys()
        assert {"learning_rate_trunk", "learning_rate_head", "learning_rate_proxies"} <= entry.keys()
        assert {"images_per_second", "seconds", "peak_memory_mb"} <= entry.keys()
        assert entry["loss"] == pytest.approx(entry["sample_loss"] + 0.3 * entry["proxy_loss"], rel=1e-5)
    assert trained_run.scores.keys() == {
        *("start", "trained", "held_out", "untrained", "pixels", "gain"),
        *("best_epoch", "epoch_chosen_by", "seconds", "made_by"),
    } | ({"last_epoch"} if trained_run.scores["best_epoch"] < 2 else set())
    assert trained_run.scores["trained"]["classes"] == 18


def test_the_loss_falls_and_the_space_gets_better(tmp_path: Path) -> None:
    recipe = GLYPHS.changed({"classes": 40, "epochs": 4, "proxies_per_class": 3, "ratio": 0.2})
    run = start.train(recipe, tmp_path / "run")
    losses = [entry["loss"] for entry in run.log]
    assert losses == sorted(losses, reverse=True)
    assert run.scores["trained"]["map_at_r"] > run.scores["untrained"]["map_at_r"]


@pytest.mark.slow
def test_same_seed_same_run(tiny: Recipe, tmp_path: Path) -> None:
    runs = [start.train(tiny.changed({"seed": seed}), tmp_path / str(n)) for n, seed in enumerate([3, 3, 4])]
    same_weights(runs[0].folder / "last.pt", runs[1].folder / "last.pt")
    with pytest.raises(AssertionError):
        same_weights(runs[0].folder / "last.pt", runs[2].folder / "last.pt")


@pytest.mark.slow
def test_the_number_of_workers_does_not_change_the_run(tiny: Recipe, tmp_path: Path) -> None:
    alone = start.train(tiny, tmp_path / "alone")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch and Python warn of forks of their own
        helped = start.train(tiny.changed({"workers": 2}), tmp_path / "helped")
    same_weights(alone.folder / "last.pt", helped.folder / "last.pt")


class TestAStoppedRun:
    @pytest.fixture
    def undisturbed(self, tiny: Recipe, tmp_path: Path) -> Run:
        return start.train(tiny, tmp_path / "undisturbed")

    @pytest.mark.parametrize("step", [2, 5, 10])  # in the first, second and third epoch
    @pytest.mark.slow
    def test_goes_on_to_the_same_end(self, tiny: Recipe, tmp_path: Path, undisturbed: Run, step: int) -> None:
        with pytest.raises(PlugPulledError):
            start.train(tiny, tmp_path / "stopped", progress=stop_at(step))
        stopped = Run.open(tmp_path / "stopped")
        assert len(stopped.log) == (step - 1) // 4
        torch.manual_seed(99)  # whatever the next process does first
        start.resume(stopped.folder)
        same_weights(stopped.folder / "last.pt", undisturbed.folder / "last.pt")
        same_weights(stopped.folder / "model.safetensors", undisturbed.folder / "model.safetensors")
        assert [e["loss"] for e in stopped.log] == [e["loss"] for e in undisturbed.log]
        timeless = {"trained", "best_epoch"}
        assert {k: stopped.scores[k] for k in timeless} == {k: undisturbed.scores[k] for k in timeless}

    @pytest.mark.slow
    def test_goes_on_to_the_same_end_with_sparse_gradients_too(self, tiny: Recipe, tmp_path: Path) -> None:
        recipe = tiny.changed({"sparse_gradient": True, "proxy_weight": 0.0, "links": 4})
        undisturbed = start.train(recipe, tmp_path / "undisturbed")
        with pytest.raises(PlugPulledError):
            start.train(recipe, tmp_path / "stopped", progress=stop_at(6))
        start.resume(tmp_path / "stopped")
        same_weights(tmp_path / "stopped" / "last.pt", undisturbed.folder / "last.pt")

    @pytest.mark.slow
    def test_truncated_checkpoint_falls_back(self, tiny: Recipe, tmp_path: Path, undisturbed: Run) -> None:
        with pytest.raises(PlugPulledError):
            start.train(tiny, tmp_path / "stopped", progress=stop_at(10))
        path = tmp_path / "stopped" / "last.pt"
        path.write_bytes(path.read_bytes()[:-1000])
        with pytest.warns(UserWarning, match=r"last.pt is damaged.*using the one before it"):
            start.resume(tmp_path / "stopped")
        same_weights(path, undisturbed.folder / "last.pt")
        assert len(Run.open(tmp_path / "stopped").log) == 3

    @pytest.mark.slow
    def test_that_was_finished_stays_as_it_is(self, undisturbed: Run) -> None:
        before = (undisturbed.folder / "last.pt").read_bytes()
        again = start.resume(undisturbed.folder)
        assert (undisturbed.folder / "last.pt").read_bytes() == before
        assert len(again.log) == 3

    @pytest.mark.slow
    def test_with_a_damaged_best_takes_it_from_the_last_epoch(self, tiny: Recipe, tmp_path: Path) -> None:
        run = start.train(tiny.changed({"held_out": 0.0}), tmp_path / "run")
        before, scores = run.load_best(), run.scores["trained"]
        (run.folder / "model.safetensors").write_bytes(b"PK")
        start.resume(run.folder)
        assert all(torch.equal(run.load_best()["model"][name], weights) for name, weights in before["model"].items())
        assert run.scores["trained"] == scores

    @pytest.mark.slow
    def test_whose_best_epoch_is_lost_says_how_to_train_it_again(
        self, tiny: Recipe, tmp_path: Path, undisturbed: Run
    ) -> None:
        folder = tmp_path / "damaged"
        shutil.copytree(undisturbed.folder, folder)
        last = load_checkpoint(folder / "last.pt")
        last["best"]["epoch"] = 1  # as if it had been the first
        Run(folder).save_last(last)
        (folder / "model.safetensors").write_bytes(b"PK")
        refusal = rf"is not from epoch 1, the best: remove {folder}/last.pt and {folder}/previous.pt, "
        with pytest.raises(ValueError, match=refusal + rf"then --resume {folder} trains again from the beginning"):
            resume(folder)
        for name in ("last.pt", "previous.pt"):
            (folder / name).unlink()
        resume(folder)
        same_weights(folder / "model.safetensors", undisturbed.folder / "model.safetensors")
        assert Run(folder).scores["trained"] == undisturbed.scores["trained"]

    @pytest.mark.slow
    def test_before_its_best_network_was_saved(
        self, tiny: Recipe, tmp_path: Path, undisturbed: Run, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def pull(*_: object) -> None:
            raise PlugPulledError

        monkeypatch.setattr(Run, "save_best", pull)
        with pytest.raises(PlugPulledError):
            train(tiny, tmp_path / "stopped")
        monkeypatch.undo()
        assert not (tmp_path / "stopped" / "model.safetensors").exists()
        resume(tmp_path / "stopped")
        same_weights(tmp_path / "stopped" / "model.safetensors", undisturbed.folder / "model.safetensors")

    @staticmethod
    def command(*arguments: object) -> list[str]:
        return [sys.executable, "-m", "proxygml", "train", *map(str, arguments)]

    OPTIONS = (
        *("glyphs", "--classes", "18", "--epochs", "6", "--proxies-per-class", "2", "--ratio", "0.5"),
        *("--held-out", "0.55", "--no-baselines"),
    )

    def started(self, folder: Path) -> subprocess.Popen:
        """A training process that has written its first checkpoint."""
        process = subprocess.Popen(
            self.command(*self.OPTIONS, "--out", folder), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        deadline = time.monotonic() + 240
        while not (folder / "last.pt").exists():
            assert time.monotonic() < deadline, "no checkpoint after two minutes"
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.005)
        return process

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """The folder of a run by the same command that nothing stopped."""
        folder = tmp_path_factory.mktemp("whole") / "run"
        subprocess.run(cls.command(*cls.OPTIONS, "--out", folder), check=True, capture_output=True)
        return folder

    def assert_resumed_equals(self, whole: Path, stopped: Path) -> None:
        subprocess.run(self.command("--resume", stopped), check=True, capture_output=True)
        same_weights(stopped / "last.pt", whole / "last.pt")

    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
    @pytest.mark.slow
    def test_by_a_signal_goes_on_to_the_same_end(self, tmp_path: Path, whole: Path, how: int) -> None:
        process = self.started(tmp_path / "killed")
        process.send_signal(how)
        _, errors = process.communicate(timeout=250)
        assert process.returncode == (130 if how == signal.SIGTERM else -how)
        said = f"stopped: continue with: python -m proxygml train --resume {tmp_path / 'killed'}"
        other = [line for line in errors.splitlines() if not line.startswith(("run folder: ", "epoch "))]
        assert other == ([said] if how == signal.SIGTERM else [])
        assert len(Run.open(tmp_path / "killed").log) < 6
        self.assert_resumed_equals(whole, tmp_path / "killed")

    @pytest.mark.slow
    def test_by_a_full_disk_says_so_in_one_line_and_goes_on(self, tmp_path: Path, whole: Path) -> None:
        """Once a checkpoint is there, no file of the process may grow beyond 300 kB, as if the disk were full."""
        folder = tmp_path / "full"
        process = self.started(folder)
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 1
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert re.search(rf"could not write .*\. When that is fixed, continue with: .* train --resume {folder}", line)
        assert "Traceback" not in errors
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == [".lock"]
        assert 1 <= len(load_checkpoint(folder / "last.pt")["log"]) < 6
        self.assert_resumed_equals(whole, folder)


class TestHeldOutClasses:
    def test_are_not_trained_on(self, tiny: Recipe) -> None:
        images, _ = load_images(tiny)
        trained_on, held_out = hold_out(images, 0.55)
        assert len(trained_on.class_names) == 8
        assert len(held_out.class_names) == 10
        assert set(trained_on.class_names) | set(held_out.class_names) == set(images.class_names)
        assert len(trained_on) + len(held_out) == len(images)
        assert hold_out(images, 0.55)[1].class_names == held_out.class_names

    @pytest.mark.slow
    def test_are_none_where_fewer_than_ten_would_be(self, tiny: Recipe, tmp_path: Path) -> None:
        images, _ = load_images(tiny)
        for fraction in (0.0, 0.1, 0.5):
            assert hold_out(images, fraction) == (images, None)
        told = []
        recipe = tiny.changed({"held_out": 0.5, "tested_epochs": (1, 2, 3)})
        run = train(recipe, tmp_path / "run", progress=lambda *what: told.append(what))
        note = "none, 0.5 of 18 classes is fewer than 10: all 18 are trained, and the last epoch is kept"
        assert ("held-out classes", 0, 0, note) in told
        assert (run.scores["best_epoch"], run.scores["epoch_chosen_by"]) == (3, None)
        assert len(run.load_last()["loss"]["proxies"]) == 18

    @pytest.mark.slow
    def test_epoch_is_one_line(self, tiny: Recipe, tmp_path: Path) -> None:
        told = []
        run = train(tiny.changed({"epochs": 2}), tmp_path / "run", progress=lambda *what: told.append(what))
        lines = [note for what, _, total, note in told if total == 0 and what.startswith("epoch ")]
        assert len(lines) == 2
        scores = run.log[0]["held_out"]
        shown = f"held-out R@1 {100 * scores['recall@1']:.1f}, MAP@R {100 * scores['map_at_r']:.1f}"
        assert re.fullmatch(rf"loss {run.log[0]['loss']:.3f}, {shown}, \d+ images/s, 0:\d\d:\d\d left", lines[0])
        assert lines[1].endswith("0:00:00 left")

    @pytest.mark.slow
    def test_choose_the_best_epoch(self, tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The scores of held-out classes are made up here: the second epoch is to win, whatever the test says."""
        made_up = iter([0.2, 0.9, 0.5])
        _, test_images = load_images(tiny)
        scored_on_test = []
        genuine = evaluator.evaluation.evaluate

        def evaluate(vectors: np.ndarray, labels: np.ndarray, **options: object):
            scores = genuine(vectors, labels, **options)
            if len(vectors) == len(test_images):
                scored_on_test.append(scores)
                return scores
            object.__setattr__(scores, "map_at_r", next(made_up))
            return scores

        monkeypatch.setattr(evaluator.evaluation, "evaluate", evaluate)
        run = train(tiny, tmp_path / "run")
        assert run.scores["best_epoch"] == 2
        assert run.load_best()["epoch"] == 2
        last, kept = scored_on_test  # at the end
        assert run.scores["last_epoch"] == last.to_json()
        assert run.scores["trained"] == kept.to_json()
        assert run.scores["epoch_chosen_by"] == "held_out"
        best, last = run.load_best()["model"], run.load_last()["model"]
        assert any(not torch.equal(best[name], last[name]) for name in best)
        for name, weights in load_model(run).state_dict().items():
            assert torch.equal(weights, best[name])
        again = Model(run).embed(test_images)
        assert genuine(again.vectors, again.labels).to_json() == run.scores["trained"]

    @pytest.mark.slow
    def test_can_be_left_out_so_that_the_last_epoch_stays(self, tiny: Recipe, tmp_path: Path) -> None:
        run = train(tiny.changed({"held_out": 0.0}), tmp_path / "run")
        assert run.scores["best_epoch"] == 3
        assert "held_out" not in run.log[0]

    @pytest.mark.slow
    def test_paper_chooses_on_test_classes(self, tiny: Recipe, tmp_path: Path) -> None:
        run = train(tiny.changed({"held_out": 0.0, "tested_epochs": (1,)}), tmp_path / "run")
        assert ["test" in entry for entry in run.log] == [True, False, True]  # the last is always among them
        scores = [entry["test"]["map_at_r"] for entry in (run.log[0], run.log[2])]
        assert run.scores["best_epoch"] == (1, 3)[int(np.argmax(scores))]
        assert run.scores["trained"]["map_at_r"] == pytest.approx(max(scores))

    @pytest.mark.slow
    def test_last_epoch_is_kept(self, tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        made_up = iter([0.9, 0.5, 0.1, 0.1])  # after each epoch, and at the end
        genuine = evaluator.evaluation.evaluate

        def evaluate(*given: object, **options: object):
            scores = genuine(*given, **options)
            object.__setattr__(scores, "map_at_r", next(made_up))
            return scores

        monkeypatch.setattr(evaluator.evaluation, "evaluate", evaluate)
        settings = {"held_out": 0.0, "tested_epochs": (1, 2, 3), "keep_epoch": "last"}
        run = train(tiny.changed(settings), tmp_path / "run")
        assert [entry["test"]["map_at_r"] for entry in run.log] == [0.9, 0.5, 0.1]
        assert run.scores["best_epoch"] == run.load_best()["epoch"] == 3
        best, last = run.load_best()["model"], run.load_last()["model"]
        assert all(torch.equal(best[name], last[name]) for name in last)
        kept = running.summary(run)
        assert (kept["best_epoch"], kept["scores"]["map_at_r"]) == (3, 0.1)
        assert [point["epoch"] for point in kept["curve"]] == [1, 2, 3]

    @pytest.mark.slow
    def test_the_last_epoch_is_kept_against_held_out_classes_too(self, tiny: Recipe, tmp_path: Path) -> None:
        run = train(tiny.changed({"keep_epoch": "last"}), tmp_path / "run")
        assert run.scores["best_epoch"] == run.load_best()["epoch"] == 3
        assert run.scores["held_out"] == run.log[2]["held_out"]


class TestNarrowing:
    RECIPE = Recipe(start_ratio=1.0, ratio=0.01, proxies_per_class=10, epochs=5)

    def test_links_fall_geometrically(self) -> None:
        links = [scheduled_links(self.RECIPE, 100, epoch) for epoch in range(5)]
        assert links == [1000, 317, 100, 32, 10]  # 1000 / 10 ** (epoch / 2), rounded up

    def test_one_epoch_has_the_first_ratio(self) -> None:
        assert scheduled_links(self.RECIPE.changed({"epochs": 1}), 100, 0) == 1000

    @pytest.mark.slow
    def test_every_epoch_is_trained_with_its_links(
        self, tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        used: list[int] = []
        genuine = loop.TrainingLoop._compute_loss

        def counted(self: loop.TrainingLoop, *batch: torch.Tensor) -> torch.Tensor:
            used.append(self.loss.links)
            return genuine(self, *batch)

        monkeypatch.setattr(loop.TrainingLoop, "_compute_loss", counted)
        recipe = tiny.changed({"ratio": 0.25, "start_ratio": 1.0, "held_out": 0.0})
        run = train(recipe, tmp_path / "run")  # 18 classes of 2 proxies
        steps = len(used) // 3
        assert used == [36] * steps + [18] * steps + [9] * steps
        same = train(recipe.changed({"start_ratio": 0.25}), tmp_path / "same")
        plain = train(recipe.changed({"start_ratio": None}), tmp_path / "plain")
        same_weights(same.folder / "last.pt", plain.folder / "last.pt")
        assert run.log[0]["loss"] != plain.log[0]["loss"]

    @pytest.mark.slow
    def test_a_stopped_run_goes_on_with_the_links_of_its_epoch(self, tiny: Recipe, tmp_path: Path) -> None:
        recipe = tiny.changed({"start_ratio": 1.0, "ratio": 0.2})
        undisturbed = train(recipe, tmp_path / "undisturbed")
        with pytest.raises(PlugPulledError):
            train(recipe, tmp_path / "stopped", progress=stop_at(6))
        resume(tmp_path / "stopped")
        same_weights(tmp_path / "stopped" / "last.pt", undisturbed.folder / "last.pt")


class TestLearningRates:
    def test_fall_in_steps_as_the_paper_says(self) -> None:
        factors = [learning_rate_factor(Recipe(), epoch) for epoch in (0, 19.9, 20, 39.9, 40, 49.9)]
        assert factors == pytest.approx([1, 1, 0.1, 0.1, 0.01, 0.01])

    def test_fall_along_a_cosine_to_zero(self) -> None:
        recipe = Recipe(schedule="cosine", epochs=10)
        assert [learning_rate_factor(recipe, epoch) for epoch in (0, 5, 10)] == pytest.approx([1, 0.5, 0])

    @pytest.mark.slow
    def test_of_network_and_proxies_are_logged_each_with_its_own(self, tiny: Recipe, tmp_path: Path) -> None:
        recipe = tiny.changed({"schedule": "steps", "decay": (1, 2), "learning_rate": 0.01})
        log = train(recipe, tmp_path / "run").log
        assert [entry["learning_rate_trunk"] for entry in log] == pytest.approx([1e-2, 1e-3, 1e-4])
        assert [entry["learning_rate_proxies"] for entry in log] == pytest.approx([3e-2, 3e-3, 3e-4])


class TestTheOptimizer:
    @pytest.mark.slow
    def test_moves_network_and_proxies(self, tiny: Recipe, tmp_path: Path) -> None:
        seed_everything(tiny.seed, verbose=False)
        model = build.build_model(tiny)
        proxies = build.build_loss(tiny, 8).proxies
        after = train(tiny.changed({"epochs": 1}), tmp_path / "run").load_last()
        assert not torch.equal(after["loss"]["proxies"], proxies)
        for name, weights in model.state_dict().items():
            assert not torch.equal(after["model"][name], weights), name

    def test_has_the_settings_of_the_recipe(self) -> None:
        recipe = Recipe(
            learning_rate=0.1, head_learning_rate=0.2, proxy_learning_rate=0.3, adam_epsilon=0.4, weight_decay=0.5
        )
        model, loss = build.build_model(recipe), build.build_loss(recipe, 100)
        optimizer = build.build_optimizer(recipe, model, loss)
        assert isinstance(optimizer, torch.optim.Adam)
        assert {group["name"]: group["lr"] for group in optimizer.param_groups} == {
            "trunk": 0.1,
            "head": 0.2,
            "proxies": 0.3,
        }
        assert {(group["eps"], group["weight_decay"]) for group in optimizer.param_groups} == {(0.4, 0.5)}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        assert {id(p) for p in held} == {id(p) for p in [*model.parameters(), *loss.parameters()]}

    @pytest.mark.slow
    def test_leaves_frozen_stages_alone(self, tiny: Recipe, tmp_path: Path) -> None:
        recipe = tiny.changed({"epochs": 1, "frozen": ("block1", "block2")})
        seed_everything(recipe.seed, verbose=False)
        before = build.build_model(recipe).state_dict()
        after = train(recipe, tmp_path / "run").load_last()["model"]
        still = {name for name in before if torch.equal(before[name], after[name])}
        assert still == {name for name in before if name.startswith(("trunk.block1", "trunk.block2"))}


@pytest.mark.slow
def test_warm_up_trains_head_and_proxies_only(tiny: Recipe, tmp_path: Path) -> None:
    recipe = tiny.changed({"epochs": 1, "warmup": (0,)})
    run = train(recipe, tmp_path / "run")
    seed_everything(recipe.seed, verbose=False)
    before = build.build_model(recipe).state_dict()
    after = run.load_last()["model"]
    for name, weights in before.items():
        is_statistic = "running" in name or "num_batches" in name
        moved = not torch.equal(weights, after[name])
        assert moved == (name.startswith("head") or is_statistic), name


@pytest.mark.slow
def test_frozen_batch_norm(tiny: Recipe, tmp_path: Path) -> None:
    run = train(tiny.changed({"epochs": 1, "freeze_batch_norm": True}), tmp_path / "run")
    weights = run.load_last()["model"]
    assert weights["trunk.block1.1.running_mean"].abs().max() == 0
    assert weights["trunk.block1.1.num_batches_tracked"] == 0
    assert not torch.equal(weights["trunk.block1.1.weight"], torch.ones(32))


def test_the_model_of_a_run_gives_the_scores_of_the_run(trained_run: Run) -> None:
    from proxygml import embeddings, evaluation

    _, images = load_images(trained_run.recipe)
    vectors = embeddings.embed(load_model(trained_run), build.test_crops(trained_run.recipe, images), images.paths)
    np.testing.assert_allclose(np.linalg.norm(vectors.vectors, axis=1), 1, rtol=1e-5)
    scores = evaluation.evaluate(vectors.vectors, vectors.labels)
    assert scores.to_json() == trained_run.scores["trained"]


def test_a_loss_that_explodes_ends_the_run_with_advice(tiny: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lower learning_rate|NaN or infinity"):
        start.train(tiny.changed({"learning_rate": 1e30}), tmp_path / "run")


def test_an_unknown_loss_dataset_or_backbone_is_named(tiny: Recipe, tmp_path: Path) -> None:
    for number, (field, known) in enumerate([("loss", "proxygml"), ("dataset", "glyphs"), ("backbone", "convnet")]):
        with pytest.raises(ValueError, match=rf"got 'nonsense'.*known: .*{known}"):
            start.train(tiny.changed({field: "nonsense"}), tmp_path / str(number))


def test_a_place_that_cannot_be_written_is_named(tiny: Recipe) -> None:
    with pytest.raises(OSError, match="/proc/nowhere"):
        start.train(tiny, Path("/proc/nowhere"))


@pytest.mark.slow
def test_one_dimension_is_plotted(tiny: Recipe, tmp_path: Path) -> None:
    run = start.train(tiny.changed({"embedding_dim": 1, "epochs": 1}), tmp_path / "run")
    assert (run.folder / "map.png").exists()


@pytest.mark.slow
def test_without_a_test_nobody_looks_at_the_test_classes(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = []
    plain = evaluator.embed
    monkeypatch.setattr(
        evaluator, "embed", lambda model, crops, *a, **k: scored.append(len(crops)) or plain(model, crops, *a, **k)
    )
    run = start.train(tiny.changed({"test": False, "baselines": True}), tmp_path / "run")
    _, held_out = hold_out(load_images(tiny)[0], tiny.held_out)
    assert scored == [len(held_out)] * tiny.epochs
    best = max(run.log, key=lambda entry: entry["held_out"]["map_at_r"])
    assert run.scores["held_out"] == best["held_out"]
    assert run.scores.keys() == {"start", "held_out", "best_epoch", "epoch_chosen_by", "seconds", "made_by"}
    assert not (run.folder / "retrieval.png").exists()


@pytest.mark.slow
def test_frozen_backbone_is_scored_without_head(tiny: Recipe, tmp_path: Path) -> None:
    run = start.train(tiny.changed({"baselines": True, "epochs": 1}), tmp_path / "run")
    seed_everything(tiny.seed, verbose=False)
    model = build.build_model(tiny)
    model.head = torch.nn.Identity()
    _, test_images = load_images(tiny)
    embeddings = embed(model, build.test_crops(tiny, test_images), test_images.paths)
    assert embeddings.vectors.shape[1] == model.trunk.channels
    expected = evaluate(embeddings.vectors, embeddings.labels).to_json()
    assert run.scores["untrained"]["recall@1"] == pytest.approx(expected["recall@1"])
    assert run.scores["untrained"]["map_at_r"] == pytest.approx(expected["map_at_r"])


@pytest.mark.slow
def test_cache_is_filled_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(8):
        for copy in range(3):
            path = tmp_path / "photos" / f"class{number}" / f"{copy}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (200, 150), (30 * number, 40 * copy, 90)).save(path)
    wanted = []
    plain = Cache.open
    monkeypatch.setattr(Cache, "open", lambda self, photo: wanted.append(photo) or plain(self, photo))
    recipe = GLYPHS.changed(
        {"dataset": "folder", "data": str(tmp_path / "photos"), "cache": str(tmp_path / "cache"), "image_size": 32}
        | {"held_out": 0.5, "epochs": 2, "ratio": 1.0, "baselines": False}
    )
    start.train(recipe, tmp_path / "run")
    train_images, _ = load_images(recipe)
    assert len(list((tmp_path / "cache").glob("*.npy"))) == len(train_images)
    tried_on_the_network, *wanted = wanted
    assert sorted(wanted) == sorted(2 * [train_images.file(index) for index in range(len(train_images))])
    assert tried_on_the_network in wanted


def poisoned_loss(monkeypatch: pytest.MonkeyPatch, poisoned: Callable[[int], bool]) -> None:
    """From now on the proxies of a loss get NaN as their gradient in some steps, counted from 1."""
    build_loss, steps = build.build_loss, itertools.count(1)

    def build_poisoned(recipe: Recipe, num_classes: int, loss: None) -> torch.nn.Module:
        loss = build_loss(recipe, num_classes)
        loss.proxies.register_hook(lambda gradient: gradient * (torch.nan if poisoned(next(steps)) else 1))
        return loss

    monkeypatch.setattr(build, "build_loss", build_poisoned)


@pytest.mark.slow
def test_nan_gradient_skips_the_step(tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned_loss(monkeypatch, lambda step: step in (2, 3))
    told = []
    run = start.train(tiny, tmp_path / "run", progress=lambda *what: told.append(what))
    assert [entry.get("skipped_steps", 0) for entry in run.log] == [2, 0, 0]
    assert run.scores["skipped_steps"] == 2
    assert ("skipped", 0, 0, "2 steps with a gradient that was not finite") in told
    state = run.load_last()
    tensors = [*state["model"].values(), *state["loss"].values()]
    assert all(tensor.isfinite().all() for tensor in tensors if tensor.is_floating_point())
    (steps,) = {float(one["step"]) for one in state["optimizer"]["state"].values()}
    assert steps == sum(1 for what, *_ in told if what == "training") - 2


def test_a_run_of_nothing_but_nan_ends_with_a_clear_line(
    tiny: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned_loss(monkeypatch, lambda step: step > 1)
    monkeypatch.setattr(monitor, "MAX_SKIPPED", 3)
    with pytest.raises(ValueError, match="epoch 1, step 4: the gradient was not finite in 3 steps in a row: lower"):
        start.train(tiny, tmp_path / "run")


def test_every_class_is_trained_on(tiny: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    random = np.random.default_rng(0)
    for number in range(28):
        file = tmp_path / "photos" / f"class {number % 14}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (32, 32), np.uint8)).save(file)
    changes = {"dataset": "folder", "data": str(tmp_path / "photos"), "classes": None, "epochs": 1, "baselines": True}
    recipe = tiny.changed({**changes, "test_fraction": 0, "held_out": 0.7})  # 10 of 14 classes, if some were tested on
    told: list = []
    run = start.train(recipe, tmp_path / "run", progress=lambda *what: told.append(what))
    assert not {"trained", "untrained", "held_out"} & run.scores.keys()
    assert run.load_best()["loss"]["proxies"].shape[0] == 14
    note = "none, no classes to test on: all 14 are trained, and the last epoch is kept"
    assert ("held-out classes", 0, 0, note) in told
    show_run(run.folder, recipe, run.scores)
    assert "no test score: --test-fraction 0 leaves no classes to test on" in capsys.readouterr().out
    for number in range(14):
        (tmp_path / "photos" / f"class {number}" / f"{number + 14}.png").unlink()
        if number > 2:
            shutil.rmtree(tmp_path / "photos" / f"class {number}")
    with pytest.raises(ValueError, match="at least two images to test on, got one: add images, or set test_fraction 0"):
        start.train(recipe.changed({"test_fraction": 0.5}), tmp_path / "other")
    with pytest.raises(ValueError, match="tested_epochs needs test classes, and test_fraction 0 leaves none"):
        start.train(recipe.changed({"tested_epochs": (1,)}), tmp_path / "other")
