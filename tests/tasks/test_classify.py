"""Classes by the vote of neighbors, and calibrations that are stored with an index."""

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxygml.cli.classify import show_answers
from proxygml.cli.main import main
from proxygml.embeddings import Embeddings
from proxygml.retrieval import Hit, Index
from proxygml.tasks.calibrate import calibrate
from proxygml.tasks.classify import (
    Answer,
    Calibration,
    Candidate,
    answer,
    classify,
    read_calibration,
    store_calibration,
)
from proxygml.training.run import Run
from tests.tasks.conftest import blobs
from tests.test_model import failure, run_command

HITS = [("crow", 0.9), ("owl", 0.8), ("", 0.8), ("crow", 0.5)]
CALIBRATION = Calibration(0.8, agreement=0.2, temperature=0.5, false_accepts=0.01, model="", images=10, classes=2)


def hits(*pairs: tuple[str, float]) -> list[Hit]:
    return [Hit(f"{number}.jpg", label, 0.1, similarity, number) for number, (label, similarity) in enumerate(pairs)]


def test_vote_by_hand() -> None:
    votes = Counter()
    for label, similarity in HITS:
        if label:
            votes[label] += math.exp((similarity - 1) / 0.05)
    share = votes["crow"] / votes.total()
    found = answer(hits(*HITS))
    assert found.label == "crow"
    assert found.score == pytest.approx(0.9 + 0.1 * math.log(share))
    shares = {label: votes[label] / votes.total() for label in ("crow", "owl")}
    assert [candidate.label for candidate in found.candidates] == ["crow", "owl"]
    for label, probability in found.candidates:
        assert probability == pytest.approx(shares[label] / (1 + 0.1))
    squared = answer(hits(*HITS), CALIBRATION).candidates  # temperature 1/2
    total = sum(each**2 for each in shares.values()) + 0.1**2
    assert answer(hits(*HITS), CALIBRATION).score == pytest.approx(0.9 + 0.2 * math.log(share))
    assert squared[0].probability == pytest.approx(shares["crow"] ** 2 / total)


def test_ten_copies_have_score_one() -> None:
    assert answer(hits(*[("crow", 1.0)] * 10)).score == pytest.approx(1)


def test_unknown_below_the_threshold() -> None:
    far = [(label, similarity - 0.4) for label, similarity in HITS]
    assert answer(hits(*HITS), CALIBRATION).label == "crow"
    assert answer(hits(*far), CALIBRATION).label is None
    assert answer(hits(*far)).label == "crow"


def test_new_class_needs_only_photos_of_it() -> None:
    items = blobs(5, 12)
    old = items.labels < 4
    index = Index.from_embeddings(
        replace(items, vectors=items.vectors[old], labels=items.labels[old], paths=items.paths[old])
    )
    measured = calibrate(replace(items, vectors=items.vectors[old], labels=items.labels[old], paths=items.paths[old]))
    query = items.vectors[~old][:1]
    assert classify(index, query, measured.calibration)[0].label is None
    new = np.flatnonzero(~old)[1:]
    index.add(replace(items, vectors=items.vectors[new], labels=items.labels[new], paths=items.paths[new]))
    assert classify(index, query, measured.calibration)[0].label == "class4"


def test_small_probability_is_not_shown_as_zero(capsys) -> None:
    show_answers(["1.jpg"], [Answer("crow", 0.9, [Candidate("crow", 0.95), Candidate("owl", 0.004)], False)])
    assert "crow 95 %  owl <1 %" in capsys.readouterr().out


@pytest.mark.parametrize("storage", ["folder", "postgres"])
def test_calibration_is_stored(storage: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    location = tmp_path / "index" if storage == "folder" else request.getfixturevalue("new_database")
    index = Index.create(location, dim=2)
    assert read_calibration(index) is None
    store_calibration(index, CALIBRATION)
    assert read_calibration(Index.open(location)) == CALIBRATION


def test_calibration_of_another_network_or_damaged_is_an_error(tmp_path: Path) -> None:
    index = Index.create(tmp_path / "index", dim=2, model="new")
    store_calibration(index, replace(CALIBRATION, model="old"))
    with pytest.raises(ValueError, match="is of model old, its vectors are of model new: repeat `proxygml calibrate`"):
        read_calibration(index)
    good = {
        "threshold": 0.5,
        "agreement": 0.1,
        "temperature": 1.0,
        "false_accepts": 0.01,
        "model": "new",
        "images": 5,
        "classes": 2,
    }
    for change in ({"threshold": "x"}, {"threshold": None}, {"temperature": 0}, {"other": 1}):
        index.set_metadata("calibration", json.dumps(good | change))
        with pytest.raises(ValueError, match=r"the calibration of .* is damaged: repeat `proxygml calibrate`"):
            read_calibration(index)
    index.set_metadata("calibration", "[" * 10**5)
    with pytest.raises(ValueError, match="is damaged"):
        read_calibration(index)


class TestCommands:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Path:
        """index, of twelve classes, and queries.npz: one of them, and one of no class."""
        monkeypatch.chdir(tmp_path)
        items = blobs(12, 10)
        items.save(Path("items.npz"))
        other = blobs(1, 1, seed=9).vectors
        Embeddings(
            np.concatenate([items.vectors[:1] + 0.01, other]), np.array([-1, -1]), np.array(["known", "other"])
        ).save(Path("queries.npz"))
        run_command(capsys, "index", "build", "items.npz", "--out", "index")
        return tmp_path

    def test_classify_before_and_after_calibrate(self, folder: Path, capsys) -> None:
        ask = ["classify", "index", "--vectors", "queries.npz"]
        entries = json.loads(run_command(capsys, *ask, "--json"))
        assert [entry["calibrated"] for entry in entries] == [False, False]
        main(ask)
        before = capsys.readouterr()
        assert "unknown" not in before.out
        assert "not calibrated, so nothing is unknown" in before.err
        shown = run_command(capsys, "calibrate", "index", "--picture", "curves.png", "--false-accepts", "0.05")
        assert "120 images of 12 classes" in shown
        assert "stored in index" in shown
        assert (folder / "curves.png").stat().st_size > 10_000
        main(ask)
        after = capsys.readouterr()
        assert [line.split()[:2] for line in after.out.splitlines()[1:]] == [["known", "class0"], ["other", "unknown"]]
        assert after.err == ""
        entries = json.loads(run_command(capsys, *ask, "--json"))
        assert [(entry["label"], entry["calibrated"]) for entry in entries] == [("class0", True), (None, True)]
        assert entries[0]["candidates"][0]["probability"] > 0.9
        measured = json.loads(run_command(capsys, "calibrate", "index", "--json"))
        assert measured["calibration"]["images"] == 120
        assert measured["auroc"] > 0.95

    def test_two_separate_classes_need_no_caution(self, folder: Path, capsys) -> None:
        blobs(2, 20).save(Path("two.npz"))
        run_command(capsys, "index", "build", "two.npz", "--out", "two")
        main(["calibrate", "two"])
        assert "than by guessing" not in capsys.readouterr().err

    def test_mistakes_are_one_line(self, folder: Path, capsys) -> None:
        assert "expected something to classify: --image" in failure(capsys, "classify", "index")
        line = failure(capsys, "calibrate", "index", "--picture", "curves.txt")
        assert "expected a --picture that ends in .png, .pdf, .svg, got curves.txt" in line
        assert "an index (a folder or postgresql://...)" in failure(capsys, "calibrate", "items.npz")
        assert "false accepts between 0 and 1, got 2" in failure(capsys, "calibrate", "index", "--false-accepts", "2")
        main(["classify", "items.npz", "--vectors", "queries.npz"])
        assert "build an index, then calibrate it" in capsys.readouterr().err
        np.savez("plain.npz", vectors=np.eye(16, dtype=np.float32))
        line = failure(capsys, "classify", "plain.npz", "--vectors", "queries.npz")
        assert "none of the nearest items has a class" in line

    def test_zero_vectors_are_not_calibrated(self, folder: Path, capsys) -> None:
        items = blobs(12, 10)
        items.vectors[17] = 0
        items.save(Path("zero.npz"))
        run_command(capsys, "index", "build", "zero.npz", "--out", "zero")
        line = failure(capsys, "calibrate", "zero")
        assert "zero vectors: 1 of 120, first image class1/17.jpg: leave them out" in line

    def test_folder_of_images_against_a_run(self, trained_run: Run, folder: Path, capsys) -> None:
        for number in range(2):
            (folder / "new").mkdir(exist_ok=True)
            Image.new("RGB", (40, 40), (100 * number, 0, 0)).save(folder / "new" / f"{number}.png")
        shutil.copytree(trained_run.folder, "run")
        (folder / "new" / "broken.png").write_text("no image")
        main(["classify", "run", "--image", "new"])
        shown, said = capsys.readouterr()
        assert "skipped 1 of 3 images that cannot be read: broken.png" in said
        assert [line.split()[0] for line in shown.splitlines()] == ["image", "new/0.png", "new/1.png"]
        assert "--split all has two" in failure(capsys, "calibrate", "run", "--split", "all")
        main(["calibrate", "run", "--split", "train"])
        assert "the network was trained on 8 of these 18 classes" in capsys.readouterr().err
