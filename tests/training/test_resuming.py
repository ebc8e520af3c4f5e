"""What may change when a run is resumed."""

import shutil
from pathlib import Path

import pytest
import torch

from proxygml.display import no_progress
from proxygml.training.recipe import Recipe
from proxygml.training.resuming import check_changes
from proxygml.training.run import Run
from proxygml.training.start import resume


@pytest.fixture
def run(trained_run: Run, tmp_path: Path) -> Run:
    """A finished run of two epochs."""
    shutil.copytree(trained_run.folder, tmp_path / "run")
    return Run.open(tmp_path / "run")


@pytest.mark.slow
def test_more_epochs_at_other_rates(run: Run) -> None:
    changes = {"epochs": 3, "learning_rate": 5e-3, "weight_decay": 0.5, "adam_epsilon": 1e-3}
    told = []
    recipe = run.recipe.changed(changes)
    resume(run.folder, recipe, progress=lambda what, done, total, note: told.append((what, note)))
    assert [entry["epoch"] for entry in run.log] == [1, 2, 3]
    assert run.log[-1]["learning_rate_trunk"] < 0.25 * 5e-3  # the cosine of 3 epochs begins the last at 0.25
    assert ("learning rates", "follow a cosine over all of them: epoch 3 starts at 25 % of the initial rates") in told
    assert ("epochs", "3, was 2") in told
    for group in run.load_last()["optimizer"]["param_groups"]:
        assert (group["weight_decay"], group["eps"]) == (0.5, 1e-3)
    assert run.recipe == recipe
    assert "trained" in run.scores


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pooling", "max"),
        ("image_size", 48),
        ("batch_size", 8),
        ("seed", 1),
        ("optimizer", "sgd"),
        ("recall_at", (1, 3)),
    ],
)
def test_other_changes_are_refused_by_name(run: Run, name: str, value: object) -> None:
    edited = run.recipe.changed({name: value, "learning_rate": 1.0})
    (run.folder / "recipe.json").write_text(edited.to_json())
    with pytest.raises(
        ValueError, match=f"--resume cannot change {name} from .* to .*: change it back, or train a new run"
    ):
        resume(run.folder)


def test_rates_of_no_epoch_are_refused() -> None:
    checkpoint = {"recipe": {"epochs": 2, "learning_rate": 0.1}, "log": [{}, {}]}
    with pytest.raises(
        ValueError, match="no epoch is left to train with learning_rate: name more than 2 with --epochs"
    ):
        check_changes(Recipe(epochs=2, learning_rate=0.5), checkpoint, no_progress)
    check_changes(Recipe(epochs=3, learning_rate=0.5), checkpoint, no_progress)


def test_fewer_epochs_than_trained_are_refused(run: Run) -> None:
    checkpoint = {"recipe": {"epochs": 2}, "log": [{}, {}]}
    with pytest.raises(ValueError, match="at least as many epochs as are trained, 2, got 1"):
        check_changes(Recipe(epochs=1), checkpoint, no_progress)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.slow
def test_run_of_a_gpu_continues_on_a_cpu(run: Run) -> None:
    (run.folder / "recipe.json").write_text(run.recipe.changed({"device": "cuda"}).to_json())
    with pytest.warns(UserWarning, match="this machine has no cuda: continuing on the CPU"):
        resume(run.folder)
    assert run.recipe.device == "cuda"


def test_missing_images_name_run_folder_and_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.create("run", Recipe(dataset="folder", data="photos", cache="cache"))
    assert (run.recipe.data, run.recipe.cache) == (str(tmp_path / "photos"), str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match=f"the images of run are not in {tmp_path}/photos: name .* with --data"):
        resume("run")
