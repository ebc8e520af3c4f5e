"""Datasets, losses and loggers of one's own on the command line, by module:name."""

import csv
import json
import re
from pathlib import Path

import pytest

from proxygml.cli.main import main
from proxygml.embeddings import Embeddings
from proxygml.retrieval import Index
from proxygml.training.run import Run
from tests.cli.test_cli import failure

MODULE = """
from torch import nn
from proxygml.data import load

def letters():
    images = load("glyphs", size=16, classes=12)[0]
    return [(images.open(row), images.class_names[images.labels[row]]) for row in range(len(images))]

class Letters(list):
    def __init__(self, folder):
        super().__init__(letters())

items = letters()

class Weighted(nn.Module):
    def __init__(self, num_classes, embedding_dim, *, weight=1.0):
        super().__init__()
        self.layer, self.weight = nn.Linear(embedding_dim, num_classes), weight

    def forward(self, embeddings, labels):
        return self.weight * nn.functional.cross_entropy(self.layer(embeddings), labels)
"""
SMALL = ["--classes", "None", "--image-size", "16", "--embedding-dim", "8", "--held-out", "0", "--no-baselines"]


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current folder."""
    (tmp_path / "my_objects.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("elsewhere")  # restores the path afterwards
    monkeypatch.delitem(__import__("sys").modules, "my_objects", raising=False)


@pytest.mark.slow
def test_train_resume_embed_and_index(capsys: pytest.CaptureFixture) -> None:
    objects = ["--dataset", "my_objects:letters", "--loss", "my_objects:Weighted"]
    settings = ["--loss-settings", "weight=2", "--epochs", "1"]
    main(["train", "glyphs", *objects, *settings, *SMALL, "--out", "run", "--log", "csv"])
    run = Run("run")
    assert (run.recipe.dataset, run.recipe.loss) == ("my_objects:letters", "my_objects:Weighted")
    assert "index build --run run --dataset my_objects:letters --split" in capsys.readouterr().out
    for given, missing in (([], "data=my_objects:letters"), (objects[:2], "loss=my_objects:Weighted")):
        option = "--dataset" if "data" in missing else "--loss"
        code, line = failure(capsys, "train", "--resume", "run", "--epochs", "2", *given)
        assert code == 1
        assert re.search(rf"needs {missing}, which is not stored in it: .* or {option} MODULE:NAME$", line)
    objects[1] = "my_objects:items"  # the same images
    main(["train", "--resume", "run", "--epochs", "2", *objects, "--log", "csv"])
    assert (len(run.log), run.recipe.dataset) == (2, "my_objects:letters")
    with open("run/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == [entry["loss"] for entry in run.log]
    main(["embed", "run", "--dataset", "my_objects:letters", "--out", "test.npz"])
    main(["embed", "run", "--dataset", "my_objects:Letters", "--data", ".", "--out", "again.npz", "--split", "test"])
    assert len(Embeddings.load("test.npz")) == len(Embeddings.load("again.npz")) == run.scores["trained"]["images"]
    main(["index", "build", "--dataset", "my_objects:letters", "--run", "run", "--out", "index"])
    assert len(Index.open("index")) == run.scores["trained"]["images"]
    capsys.readouterr()
    main(["evaluate", "test.npz", "--json"])
    scores = json.loads(capsys.readouterr().out)
    assert scores["recall@1"] == run.scores["trained"]["recall@1"]
    code, line = failure(capsys, "evaluate", "run")
    assert "needs data=my_objects:letters, which is not stored in it: pass the images to a method" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dataset", "my_objects:leters"], "my_objects has no leters: did you mean 'letters'?"),
        (
            ["--dataset", "no_module:letters"],
            "no module no_module is installed or in the current folder: expected",
        ),
        (["--dataset", "my_objects:letters", "--data", "."], "expected my_objects:letters to take the folder /"),
        (
            ["--dataset", "my_objects:Letters"],
            "expected my_objects:Letters to take no arguments without --data:",
        ),
        (["--dataset", "my_objects:items", "--data", "."], "expected data=builtins:list alone, got the folder"),
        (
            ["--loss", "my_objects:Weighted", "--loss-settings", "w=2"],
            "other parameters in loss_settings:",
        ),
        (["--loss", "my_objects:letters"], "expected my_objects:letters to make a torch.nn.Module, got list"),
        (["--backbone", "my_objects:Weighted"], "network=my_objects:Weighted, which is not stored in it: pass network"),
    ],
)
def test_mistake_is_one_line(options: list, message: str, capsys: pytest.CaptureFixture) -> None:
    code, line = failure(capsys, "train", "glyphs", *SMALL, *options, "--out", "run")
    assert code == 1
    assert message in line
    assert not Path("run").exists()


def test_name_in_a_recipe_is_not_imported(capsys: pytest.CaptureFixture) -> None:
    Path("malicious.py").write_text("open('imported', 'w')")
    Path("run").mkdir()
    Path("run", "recipe.json").write_text(json.dumps({"dataset": "malicious:open", "loss": "malicious:open"}))
    commands = "train --resume run", "embed run --out v.npz", "search run --image a.jpg", "browse run", "export run x"
    for command in commands:
        assert failure(capsys, *command.split())[0] == 1
    assert not Path("imported").exists()
