"""`proxygml index` for photos that have moved, and for folders and classes that are removed."""

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxygml.cli.main import main
from proxygml.display import counted
from proxygml.embeddings import Embeddings
from proxygml.retrieval import Index
from proxygml.server.opening import open_space
from proxygml.tasks.classify import read_calibration
from proxygml.training.run import Run
from tests.tasks.conftest import blobs
from tests.test_model import failure, run_command

NAMES = ["crow/1.jpg", "crow/2.jpg", "owl/1.jpg", "owl/2.jpg", "wren/1.jpg", "wrens/1.jpg"]


class TestMovedPhotos:
    @pytest.fixture
    def moved(self, trained_run: Run, tmp_path: Path, monkeypatch, capsys) -> Path:
        """The new folder, archive/2024, of photos that are in an index."""
        monkeypatch.chdir(tmp_path)
        for number, name in enumerate(NAMES):
            (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 40), (40 * number, 0, 0)).save(tmp_path / "photos" / name)
        run_command(capsys, "index", "build", "photos", "--out", "index", "--run", trained_run.folder)
        (tmp_path / "archive").mkdir()
        return (tmp_path / "photos").rename(tmp_path / "archive" / "2024")

    def test_relocate(self, moved: Path, trained_run: Run, tmp_path: Path, capsys) -> None:
        search = ["search", "index", "--image", "archive/2024/owl/1.jpg", "-n", "9"]
        main(search)
        lost = capsys.readouterr().err
        assert lost.startswith(f"missing: 6 images, first {tmp_path / 'photos' / 'crow' / '1.jpg'}: ")
        assert "if they have moved, use `proxygml index relocate`" in lost
        assert "relocated 6 of 6 items" in run_command(capsys, "index", "relocate", "index", "photos", moved)
        main(search)
        shown = capsys.readouterr()
        assert str(moved / "owl" / "1.jpg") in shown.out
        assert shown.err == ""
        again = ["index", "build", moved, "--out", "index", "--run", trained_run.folder]
        assert "0 new, 6 existing" in run_command(capsys, *again)  # it is still the index of these photos
        line = failure(capsys, "index", "relocate", "index", "photos", "elsewhere")
        assert f"contains no paths below {tmp_path / 'photos'}; its first is {moved / 'crow' / '1.jpg'}" in line
        main(["index", "relocate", "index", "archive", "elsewhere"])
        assert f"{tmp_path / 'elsewhere'} does not exist on this machine" in capsys.readouterr().err

    @pytest.mark.parametrize("stored", ["absolute", "relative"])
    def test_browse_with_data(self, stored: str, moved: Path, tmp_path: Path) -> None:
        index = Index.open(tmp_path / "index")
        if stored == "relative":  # own features
            (block,) = index.blocks()
            index = Index.create(tmp_path / "own", dim=index.dim)
            paths = np.array([os.path.relpath(path, tmp_path / "photos") for path in block.paths])
            index.add(replace(block, paths=paths, model=""))
        options = {"split": "test", "progress": lambda *_: None}
        expected = pytest.warns(UserWarning, match=r"crow/1.jpg does not exist; have they moved\? --data FOLDER")
        with nullcontext() if stored == "relative" else expected:
            assert open_space(index.location, data=None, **options).open_image is None
        space = open_space(index.location, data=moved, **options)
        for number, path in enumerate(space.paths):
            red, *_ = space.open_image(number).getpixel((0, 0))
            assert abs(red - 40 * NAMES.index("/".join(Path(path).parts[-2:]))) < 5
        with pytest.raises(ValueError, match=r"expected the images of the index in .*, but found neither 1.jpg nor"):
            open_space(index.location, data=tmp_path / "index", **options)


def test_refused_prefix_leaves_nothing_behind(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    blobs(2, 10).save(Path("items.npz"))
    build = ["index", "build", "items.npz", "--out"]
    line = failure(capsys, *build, "index", "--prefix", "16")
    assert "expected a prefix from 1 to below the 16 dimensions of the vectors, got 16" in line
    assert [path.name for path in tmp_path.iterdir()] == ["items.npz"]
    for name, prefix, started in (("short", ["--prefix", "4"], "with --prefix 4"), ("whole", [], "without --prefix")):
        shown = run_command(capsys, *build, name, *prefix)
        assert ("search by the first 4 of 16 dimensions finds " in shown) == (name == "short")
        line = failure(capsys, *build, name, "--prefix", "8")
        assert f"{name} was started {started}, not --prefix 8: name another --out" in line


def test_copy_keeps_the_calibration(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    blobs(12, 10).save(Path("items.npz"))
    copy = ["index", "build", "index", "--out", "copy", "--kind", "hnsw"]
    for command in (["index", "build", "items.npz", "--out", "index"], ["calibrate", "index"], copy):
        run_command(capsys, *command)
    calibration = read_calibration(Index.open("index"))
    assert calibration is not None
    assert read_calibration(Index.open("copy")) == calibration
    run_command(capsys, "calibrate", "copy", "--false-accepts", "0.2")
    run_command(capsys, *copy)  # again, which continues
    assert read_calibration(Index.open("copy")).false_accepts > calibration.false_accepts


@pytest.mark.parametrize("storage", ["folder", "postgres"])
@pytest.mark.slow
def test_remove_folders_and_classes(storage: str, request, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    location = request.getfixturevalue("new_database") if storage == "postgres" else str(tmp_path / "index")
    paths = np.array([*(str(tmp_path / "photos" / name) for name in NAMES), "crow", "7"])
    classes = np.array(["crow", "owl", "wren", "own", "7"])
    index = Index.create(location, dim=8)
    index.add(Embeddings(np.eye(8), np.array([0, 0, 1, 1, 2, 2, 3, 4]), paths, classes))
    for items, removed in [
        (["crow"], ["crow"]),  # the path, not the class
        (["photos/wren"], [paths[4]]),
        (["crow", "photos/owl/", "photos/owl/1.jpg"], paths[:4]),
        (["7"], ["7"]),
        (["."], [paths[5]]),
    ]:
        before = {path for path, _ in index.listing()}
        shown = run_command(capsys, "index", "remove", location, *items)
        assert before - {path for path, _ in index.listing()} == set(removed)
        assert shown == f"removed {len(removed)} of {counted(len(before), 'item')}\n"
        for wrong in ("", "7/", "photos/no", "cro"):
            line = failure(capsys, "index", "remove", location, wrong, *items)
            assert f"contains no path, folder or class {wrong}".strip() in line
    lines = run_command(capsys, "index", "info", location).splitlines()
    assert ["items", "0"] in map(str.split, lines)
    assert ["classes", "0"] in map(str.split, lines)
    assert ["schema_version", str(Index.open(location).metadata["schema_version"])] in map(str.split, lines)
