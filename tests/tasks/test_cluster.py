"""Clusters as links and a table, and their agreement with labels."""

import csv
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxygml.cli.main import main
from proxygml.data import table
from proxygml.data.folder import images_below
from proxygml.embeddings import Embeddings
from proxygml.tasks.cluster import agreement, find_clusters
from proxygml.tasks.photos import image_files
from proxygml.training.run import Run
from tests.tasks.conftest import blobs
from tests.test_model import failure, run_command


@pytest.mark.parametrize("count", [4, None])
def test_separate_groups_are_found(count: int | None) -> None:
    items = blobs(4, 12, spread=0.02)
    found = find_clusters(items.vectors, count)
    assert sorted(np.bincount(found)) == [12] * 4
    assert len({*zip(found.tolist(), items.labels.tolist(), strict=True)}) == 4


def test_outliers_are_in_no_cluster_and_the_largest_comes_first() -> None:
    items = blobs(3, 10, spread=0.02)
    far = 5 * np.random.default_rng(1).normal(size=(2, items.dim))
    found = find_clusters(np.concatenate([items.vectors[4:], far]))  # the first class has six
    assert found[-2:].tolist() == [-1, -1]
    assert Counter(found[:-2].tolist()) == {0: 10, 1: 10, 2: 6}


def test_agreement_by_loops() -> None:
    rng = np.random.default_rng(0)
    labels, found = rng.integers(0, 4, 60), rng.integers(-1, 5, 60)
    precision, recall = [], []
    for row in range(60):
        same = {row} if found[row] < 0 else {*np.flatnonzero(found == found[row]).tolist()}
        own = {*np.flatnonzero(labels == labels[row]).tolist()}
        precision.append(len(same & own) / len(same))
        recall.append(len(same & own) / len(own))
    f1 = 2 * np.mean(precision) * np.mean(recall) / (np.mean(precision) + np.mean(recall))
    assert agreement(labels, found)["b_cubed"] == pytest.approx(f1)
    assert agreement(labels, labels + 7) == pytest.approx({"nmi": 1, "ami": 1, "b_cubed": 1})


@pytest.mark.parametrize("count", [3, None])
def test_vectors_that_cannot_be_clustered_are_one_line(count: int | None) -> None:
    vectors = blobs(5, 12, dim=60).vectors
    vectors[7, 3] = np.inf
    with pytest.raises(ValueError, match=r"expected finite vectors .* got 1 of 60 rows that are not, first row 7"):
        find_clusters(vectors, count)
    with pytest.raises(ValueError, match="expected vectors that differ, got 60 equal ones"):
        find_clusters(np.full_like(vectors, 0.1), count)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clusters": 1}, "expected 2 to 20 clusters, the number of images, got 1"),
        ({"clusters": 21}, "got 21"),
        ({"min_size": 1}, "expected a min_size from 2 to 20, the number of images, got 1"),
    ],
)
def test_impossible_clusters_are_one_line(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        find_clusters(blobs(2, 10).vectors, **options)


def test_files_are_absolute_or_below_the_first_root_with_any(tmp_path: Path) -> None:
    for path in ("photos/in.png", "other/in.png", "out.png"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(b"")
    paths = np.array(["in.png", str(tmp_path / "out.png"), "missing.png"])
    roots = [tmp_path / "photos", tmp_path / "other"]
    assert image_files(paths, roots) == [tmp_path / "photos/in.png", tmp_path / "out.png", None]
    assert image_files(paths[:1], [tmp_path, *roots]) == [tmp_path / "photos/in.png"]


class TestCommand:
    @pytest.fixture
    def photos(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """PHOTOS with photos of the same names in four folders, and their vectors in vectors.npz."""
        monkeypatch.chdir(tmp_path)
        items = blobs(4, 6, spread=0.02)
        paths = np.array([f"{label}/{number % 6}.png" for number, label in enumerate(items.labels)])
        for path, label in zip(paths, items.labels, strict=True):
            (Path("PHOTOS") / path).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 30), (60 * int(label), 80, 0)).save(Path("PHOTOS") / path)
        for name, folder in (("vectors.npz", ""), ("elsewhere/absolute.npz", f"{tmp_path}/PHOTOS/")):
            Path(name).parent.mkdir(exist_ok=True)
            named = np.char.add(folder, paths)
            Embeddings(items.vectors, items.labels, named, items.class_names).save(Path(name))
        return tmp_path

    @pytest.mark.filterwarnings("ignore:sorted. left out")
    def test_links_and_table(self, photos: Path, capsys) -> None:
        shown = run_command(capsys, "cluster", "vectors.npz", "--data", "PHOTOS", "--out", "sorted", "--clusters", 2)
        assert "24 images in 2 clusters, 0 in none" in shown
        links = sorted(Path("sorted").glob("cluster-*/*.png"))
        assert len({link.resolve() for link in links}) == 24  # each photo once, although names are the same
        assert all(link.is_symlink() and not link.readlink().is_absolute() for link in links)
        with open("sorted/clusters.csv") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            assert (Path("sorted") / row["path"]).resolve().parent.name == row["was"].removeprefix("class")
        images, _ = table.load(Path("sorted/clusters.csv"), test_fraction=0)
        assert sorted(images.class_names) == ["cluster-001", "cluster-002"]
        with images.open(0) as image:
            assert image.size == (40, 30)
        assert Path("sorted/clusters.png").stat().st_size > 5_000
        assert "exists already" in failure(capsys, "cluster", "vectors.npz", "--out", "sorted")
        with pytest.raises(ValueError, match="no images below sorted"):  # nor is the contact sheet one
            images_below(Path("sorted"))

    def test_interruption_leaves_nothing(self, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
        def interrupt(*given: object) -> None:
            raise KeyboardInterrupt

        command = ["cluster", "vectors.npz", "--data", "PHOTOS", "--out", "sorted", "--clusters", "2"]
        with monkeypatch.context() as patch:
            patch.setattr("proxygml.tasks.cluster.draw_sheet", interrupt)
            with pytest.raises(SystemExit):
                main(command)
        assert not Path("sorted").exists()
        run_command(capsys, *command)
        assert len({link.resolve(strict=True) for link in Path("sorted").glob("cluster-*/*.png")}) == 24

    def test_folder_of_photos_without_labels(self, photos: Path, trained_run: Run, capsys) -> None:
        inside = failure(capsys, "cluster", "PHOTOS", "--run", trained_run.folder, "--out", "PHOTOS/sorted")
        assert "expected --out outside PHOTOS, got PHOTOS/sorted" in inside
        command = ["cluster", "PHOTOS", "--run", trained_run.folder, "--min-size", 3, "--out", "sorted", "--json"]
        numbers = json.loads(run_command(capsys, *command))
        assert (numbers["images"], numbers["clusters"] >= 2) == (24, True)

    def test_vectors_without_images(self, photos: Path, capsys) -> None:
        blobs(4, 8, spread=0.02).save(Path("other.npz"))
        main(["cluster", "other.npz", "--out", "sorted"])
        shown, said = capsys.readouterr()
        assert "What next" not in shown  # its table names no photos to train on
        assert [path.name for path in Path("sorted").iterdir()] == ["clusters.csv"]
        assert "AMI 100.0 %" in shown
        assert "missing: 32 of 32 images, first class0/0.jpg: name their folder with --data" in said
        vectors = blobs(4, 8, spread=0.02).vectors
        np.savez("pathless.npz", vectors=vectors)
        for command in ("cluster", "audit"):
            main([command, "pathless.npz", "--out", command])
            said = capsys.readouterr().err
            assert said == "no paths in pathless.npz: no links or pictures are made\n"
        np.savez("nan.npz", vectors=np.where(vectors == vectors[3, 0], np.nan, vectors))
        for command in ("cluster", "audit"):
            with pytest.raises(SystemExit):
                main([command, "nan.npz", "--out", "nan"])
            assert capsys.readouterr().err.startswith("error: expected finite vectors")  # and nothing before

    def test_photos_elsewhere(self, photos: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
        monkeypatch.chdir("elsewhere")
        shown = run_command(capsys, "cluster", "absolute.npz", "--out", "sorted")
        assert "train photos --dataset table --data sorted/clusters.csv" in shown
        assert len({link.resolve() for link in Path("sorted").glob("*/*.png")}) == 24
        main(["cluster", "../vectors.npz", "--data", "..", "--out", "none"])
        message = "missing: 24 of 24 images, first 0/0.png: name their folder with --data"
        assert message in capsys.readouterr().err
        (photos / "PHOTOS").rename(photos / "MOVED")
        main(["index", "build", "absolute.npz", "--out", "index"])
        for source, remedy in (("absolute.npz", "embed them again"), ("index", "use `proxygml index relocate`")):
            main(["cluster", source, "--out", f"sorted-{source}"])
            path = photos / "PHOTOS" / "0" / "0.png"
            assert f"24 of 24 images, first {path}: if they have moved, {remedy}" in capsys.readouterr().err

    def test_mistakes_are_one_line(self, photos: Path, capsys) -> None:
        np.savez("one.npz", vectors=np.ones((1, 4)))
        assert "expected 2 or more images to cluster, got 1" in failure(capsys, "cluster", "one.npz", "--out", "x")
        line = failure(capsys, "cluster", "vectors.npz", "--out", "x", "--min-size", "20")
        assert "no 20 images are closer to each other than to the rest: try --clusters K" in line
        line = failure(capsys, "cluster", "vectors.npz", "--out", "x", "--run", "PHOTOS")
        assert "--run embeds a folder of images" in line
        assert not Path("x").exists()
        with pytest.raises(SystemExit):
            main(["cluster", "vectors.npz"])
        assert "--out" in capsys.readouterr().err
