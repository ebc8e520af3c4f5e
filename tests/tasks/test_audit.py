"""Wrong labels, duplicates and outliers that were put there are found, and corrected in a table."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxygml.cli.main import main
from proxygml.data import table
from proxygml.embeddings import Embeddings
from proxygml.tasks.audit import audit, confused_classes, doubtful_labels
from proxygml.tasks.corrections import describe
from proxygml.training.run import Run
from tests.tasks.conftest import blobs
from tests.test_model import failure, run_command

WRONG = [3, 40, 77]  # rows


def flawed() -> Embeddings:
    """Twelve classes of ten with three wrong labels, a copy of row 0 in another class, and a row unlike all others."""
    items = blobs(12, 10, spread=0.1)
    labels, vectors = items.labels.copy(), items.vectors.copy()
    labels[WRONG] = (labels[WRONG] + 5) % 12
    vectors[111], labels[111] = vectors[0] + 1e-4, 11
    vectors[119] = -vectors[:110].sum(axis=0) / np.linalg.norm(vectors[:110].sum(axis=0))
    return replace(items, vectors=vectors, labels=labels)


def test_what_is_wrong_is_found() -> None:
    items = flawed()
    found = audit(items)
    labels = [finding for finding in found.findings if finding.kind == "label"]
    suspects = {*WRONG, 111, 119}
    assert {finding.row for finding in labels} <= suspects
    assert {finding.row for finding in labels} >= {*WRONG}
    for finding in labels:
        if finding.row in WRONG:
            assert finding.suggestion == str(items.paths[finding.row]).split("/")[0]
        assert items.class_name(items.labels[finding.other]) == finding.suggestion
    (copy,) = [finding for finding in found.findings if finding.kind == "duplicate"]
    assert (copy.row, copy.other, copy.score > 0.999) == (111, 0, True)
    assert describe(items, copy) == "across classes"
    assert describe(items, copy, np.repeat(["train", "test"], [100, 20])) == "across classes and train and test"
    assert 119 in [finding.row for finding in found.findings if finding.kind == "outlier"]


@pytest.mark.parametrize(("fraction", "copies"), [(0.05, 1), (0.5, 1), (1.0, 1), (1.0, 3)])
def test_many_copies_do_not_hide_each_other(fraction: float, copies: int) -> None:
    items = blobs(12, 20, spread=0.5, dim=256)
    rows = np.random.default_rng(0).permutation(len(items))[: round(fraction * len(items))]
    rng, every = np.random.default_rng(1), [items.vectors]
    every += [items.vectors[rows] + rng.normal(0, 0.005, (len(rows), items.dim)) for _ in range(copies)]
    numbers = np.concatenate([np.arange(len(items)), *[rows] * copies])  # of the original
    vectors = np.concatenate(every).astype(np.float32)
    found = audit(Embeddings(vectors, items.labels[numbers], np.arange(len(vectors)).astype(str), items.class_names))
    pairs = [(finding.row, finding.other) for finding in found.findings if finding.kind == "duplicate"]
    assert all(numbers[row] == numbers[other] for row, other in pairs)
    assert len(pairs) == len(rows) * copies * (copies + 1) // 2


def test_of_two_copies_the_wrong_label_is_left_out() -> None:
    items = flawed()
    vectors = items.vectors.copy()
    vectors[8] = vectors[3] + 1e-4
    found = audit(replace(items, vectors=vectors))
    assert (3, 8) in [(finding.row, finding.other) for finding in found.findings if finding.kind == "duplicate"]


@pytest.mark.parametrize("rate", [0.0, 0.05, 0.2])
def test_number_of_wrong_labels_is_estimated(rate: float) -> None:
    items = blobs(40, 25, spread=0.15)
    rng = np.random.default_rng(1)
    wrong = rng.random(len(items)) < rate
    labels = np.where(wrong, (items.labels + rng.integers(1, 40, len(items))) % 40, items.labels)
    margins, suggestions, count = doubtful_labels(items.vectors, labels)
    assert abs(count - wrong.sum()) <= 4 + 0.2 * wrong.sum()
    listed = np.argsort(margins)[: wrong.sum()]
    if wrong.any():
        assert wrong[listed].mean() > 0.95
        assert (suggestions[listed] == items.labels[listed]).mean() > 0.9


def test_margin_leaves_out_the_image_itself() -> None:
    vectors = np.array([[1, 0.1], [1, -0.1], [-1, 0.1], [-1, -0.1], [-1, 0.0]])
    margins, suggestions, _ = doubtful_labels(vectors, np.array([0, 0, 1, 1, 0]))
    assert margins.argmin() == 4
    assert suggestions[4] == 1


def test_confused_and_split_classes() -> None:
    items = blobs(6, 20, spread=0.02)
    labels = items.labels.copy()
    labels[:20] = np.arange(20) % 2 * 6  # one class under two names
    labels[100:] = 4  # two classes under one
    names = np.array([f"class{label}" for label in range(7)])
    found = audit(replace(items, labels=labels, class_names=names))
    assert [pair[:2] for pair in found.confused] == [("class0", "class6")]
    assert 0.4 < found.confused[0][2] < 0.7
    assert [name for name, _ in found.split] == ["class4"]


def test_confusion_by_hand() -> None:
    labels = np.repeat([0, 1, 2], [10, 20, 9])
    items = Embeddings(np.zeros((39, 1)), labels, np.arange(39).astype(str), np.array(["a", "b", "small"]))
    neighbors = np.repeat([10, 0, 0, 10, 0], [6, 4, 3, 17, 9])[:, None]  # 6 of a are near b, 3 of b near a
    assert confused_classes(items, neighbors) == [("a", "b", 9 / 30)]  # the third class is too small


def test_labels_that_are_all_wrong_are_one_line() -> None:
    items = blobs(12, 10, spread=0.05)
    with pytest.raises(ValueError, match=r"about \d+ % of the labels contradict the vectors: are they those of other"):
        audit(replace(items, labels=np.random.default_rng(0).permutation(items.labels)))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "zero vectors: 2 of 120, first image class1/17.jpg: leave them out"),
        (np.nan, "expected finite vectors .* got 2 of 120 rows that are not, first row 17"),
    ],
)
def test_vectors_that_cannot_be_compared_are_one_line(value: float, message: str) -> None:
    items = blobs(12, 10)
    items.vectors[[17, 40]] = value
    with pytest.raises(ValueError, match=message):
        audit(items)


def test_without_labels_only_duplicates_and_outliers() -> None:
    items = flawed()
    for labels in (np.full(120, -1), np.zeros(120, int)):  # none, one class
        found = audit(replace(items, labels=labels))
        assert {finding.kind for finding in found.findings} == {"duplicate", "outlier"}
    with pytest.raises(ValueError, match="expected 3 or more images to audit, got 2"):
        audit(replace(items, vectors=items.vectors[:2], labels=items.labels[:2], paths=items.paths[:2]))


class TestCommand:
    @pytest.fixture
    def photos(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """PHOTOS with the images of vectors.npz."""
        monkeypatch.chdir(tmp_path)
        items = flawed()
        for path, label in zip(items.paths.tolist(), items.labels.tolist(), strict=True):
            (Path("PHOTOS") / path).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 20), (20 * label, 80, 0)).save(Path("PHOTOS") / path)
        items.save(Path("vectors.npz"))
        return tmp_path

    def accept(self, rows: dict[str, str]) -> None:
        """Write into the column accept of rows by kind and path."""
        with open("audit/audit.csv") as file:
            lines = list(csv.DictReader(file))
        for line in lines:
            line["accept"] = rows.get(f"{line['kind']} {line['path']}", "")
        with open("accepted.csv", "w") as file:
            writer = csv.DictWriter(file, lines[0].keys())
            writer.writeheader()
            writer.writerows(lines)

    def test_accepted_rows_are_corrected(self, photos: Path, capsys) -> None:
        source = ["audit", "vectors.npz", "--data", "PHOTOS"]
        shown = run_command(capsys, *source, "--out", "audit")
        assert "120 images: " in shown
        assert "1 near-duplicate (" in shown
        assert f"--data PHOTOS --apply audit/audit.csv --out {Path('PHOTOS').absolute() / 'corrected.csv'}" in shown
        assert Path("audit/audit.png").stat().st_size > 5_000
        self.accept({"label class0/3.jpg": "yes", "duplicate class11/111.jpg": "x", "outlier class11/119.jpg": "no"})
        apply = [*source, "--apply", "accepted.csv", "--out"]
        shown = run_command(capsys, *apply, "PHOTOS/corrected.csv")
        assert "1 label corrected, 1 image left out" in shown
        assert "corrected.csv exists already: name a new table" in failure(capsys, *apply, "PHOTOS/corrected.csv")
        images, _ = table.load(Path("PHOTOS/corrected.csv"), test_fraction=0)
        assert len(images) == 119
        labels = dict(zip(images.paths, images.labels, strict=True))
        assert images.class_names[labels["class0/3.jpg"]] == "class0"
        assert images.class_names[labels["class4/40.jpg"]] == "class9"  # not accepted
        assert "expected --out in a folder that contains the images" in failure(capsys, *apply, "other/corrected.csv")
        semicolons = Path("accepted.csv").read_text().replace(",", ";")
        Path("accepted.csv").write_text(semicolons)
        assert "1 label corrected, 1 image left out" in run_command(capsys, *apply, "PHOTOS/again.csv")
        self.accept({"label class0/3.jpg": "perhaps"})
        assert "expected yes or nothing in the column accept, got 'perhaps'" in failure(capsys, *apply, "PHOTOS/c.csv")
        Path("accepted.csv").write_text("path,label\na,b\n")
        assert "expected the columns of audit.csv, got none named accept" in failure(capsys, *apply, "PHOTOS/c.csv")
        blobs(2, 5).save(Path("other.npz"))
        self.accept({"label class3/3.jpg": "", "duplicate class11/111.jpg": "yes"})
        line = failure(capsys, "audit", "other.npz", "--apply", "accepted.csv", "--out", "c.csv")
        assert "there is no image 'class11/111.jpg': name the source that was audited" in line
        assert "exists already" in failure(capsys, *source, "--out", "audit")
        assert "got the folder audit" in failure(capsys, *apply, "audit")

    def test_accepted_pair_of_classes_changes_nothing(self, photos: Path, capsys) -> None:
        names = [f"class{number:02}" for number in range(14)]
        items = blobs(7, 20, spread=0.02)
        labels = items.labels + 7 * (np.arange(140) % 2)  # each class under two names
        labels[0] = 2  # which leaves nine of class00
        replace(items, labels=labels, class_names=np.array(names)).save(Path("paired.npz"))
        shown = run_command(capsys, "audit", "paired.npz", "--out", "audit")
        assert "6 pairs of confused classes, 0 classes split in two; not checked: 1 class of fewer than 10" in shown
        assert shown.count("% of the neighbors of both are of the other class") == 5
        assert "  and 1 more in audit/audit.csv" in shown
        self.accept({"confused ": "yes"})
        main(["audit", "paired.npz", "--apply", "accepted.csv", "--out", "corrected.csv"])
        printed = capsys.readouterr()
        assert "0 labels corrected, 0 images left out" in printed.out
        assert "no change for 6 accepted rows of confused or split classes" in printed.err

    def test_run_reports_duplicates_across_train_and_test(self, trained_run: Run, photos: Path, capsys) -> None:
        numbers = json.loads(run_command(capsys, "audit", trained_run.folder, "--out", "audit", "--json"))
        assert numbers["images"] > 400
        assert numbers["across_train_and_test"] <= numbers["duplicates"]
        apply = ["--apply", "audit/audit.csv", "--out", "corrected.csv"]
        assert "0 labels corrected" in run_command(capsys, "audit", trained_run.folder, *apply)
        with open("corrected.csv") as file:
            assert {row["split"] for row in csv.DictReader(file)} == {"train", "test"}
