"""Runs, .npz files and indexes as spaces."""

import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxygml.data.splits import hold_out
from proxygml.embeddings import Embeddings
from proxygml.files import UnwritableError
from proxygml.model import Model
from proxygml.retrieval import Index
from proxygml.server.opening import open_space
from proxygml.server.space import Space
from proxygml.training import build
from proxygml.training.run import Run


def opened(path: Path, *, split: str = "test", data: Path | None = None, reported: list | None = None) -> Space:
    def progress(what: str, done: int, total: int, note: str) -> None:
        if reported is not None:
            reported.append(what)

    return open_space(str(path), split=split, data=data, progress=progress)


@pytest.fixture
def run(trained_run: Run, tmp_path: Path) -> Run:
    """A copy of the trained run."""
    shutil.copytree(trained_run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("index*"))
    return Run.open(tmp_path / "run")


@pytest.mark.slow
def test_run_is_embedded_once(run: Run) -> None:
    reported = []
    first = opened(run.folder, reported=reported)
    assert "embedding" in reported
    expected = Model(run).embed(build.load_images(run.recipe)[1])
    np.testing.assert_array_equal(first.vectors, expected.vectors)
    assert first.paths == expected.paths.tolist()
    assert len(Index.open(run.folder / "index")) == len(first)
    reported.clear()
    again = opened(run.folder, reported=reported)
    assert reported == [str(run.folder)]
    np.testing.assert_array_equal(again.vectors, first.vectors)


def test_cache_of_another_network_is_replaced(run: Run) -> None:
    with_zeros = Embeddings(np.zeros((1, 128)), np.zeros(1, int), np.array(["a"]), model="another")
    other = Index.create(run.folder / "index", dim=128, model="another")
    other.add(with_zeros)
    other.set_metadata("complete", "yes")
    other.close()
    assert opened(run.folder).unit


def test_moved_images(run: Run, photos: Path) -> None:
    recipe = run.recipe.changed({"dataset": "folder", "data": str(photos / "photos"), "classes": None})
    (run.folder / "recipe.json").write_text(recipe.changed({"test_fraction": 0.34, "held_out": 0}).to_json())
    first = opened(run.folder)
    shutil.move(photos / "photos", photos / "moved")
    space = opened(run.folder, data=photos / "moved")
    assert space.paths == first.paths
    assert size_of(space, 0) == (300, 200)


@pytest.mark.slow
def test_all_images_of_a_run(run: Run) -> None:
    space = opened(run.folder, split="all")
    assert space.name == "run, all images"
    train, test = build.load_images(run.recipe)
    assert space.paths == [*train.paths, *test.paths]
    for number, image in ((0, train.open(0)), (len(space) - 1, test.open(len(test) - 1))):
        np.testing.assert_array_equal(np.asarray(space.open_image(number)), np.asarray(image))
    assert space.subgraph_of(train.labels.tolist().index(1)).own_class == 0  # class 0 is held out
    assert space.subgraph_of(len(space) - 1).own_class is None


def test_images_of_a_run_and_uploads(run: Run) -> None:
    space = opened(run.folder)
    images = build.load_images(run.recipe)[1]
    for number in (0, 17, len(space) - 1):
        np.testing.assert_array_equal(np.asarray(space.open_image(number)), np.asarray(images.open(number)))
        vector = space.encoder.encode([images.open(number)])[0]
        np.testing.assert_allclose(vector, space.vectors[number], atol=1e-5)
        assert space.nearest(vector[None], 1)[0][0, 0] == number


@pytest.mark.slow
def test_proxies_of_a_run(run: Run) -> None:
    train = opened(run.folder, split="train")
    images = build.load_images(run.recipe)[0]
    kept, held_out = hold_out(images, run.recipe.held_out)
    assert train.proxies.class_names == kept.class_names
    np.testing.assert_array_equal(train.proxies.vectors, run.load_best()["loss"]["proxies"].numpy())
    for number in range(len(train)):
        own = train.subgraph_of(number).own_class
        name = train.class_names[train.classes[number]]
        assert (own is None) == (name in held_out.class_names)
        if own is not None:
            assert train.proxies.class_names[own] == name
    test = opened(run.folder)
    assert test.proxies.class_names == kept.class_names
    assert test.subgraph_of(0).own_class is None
    assert train.proxies.links == build.build_loss(run.recipe, len(kept.class_names)).links


def test_missing_images(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    names = opened(run.folder).proxies.class_names

    def gone(recipe: object) -> None:
        raise FileNotFoundError("no photos")

    monkeypatch.setattr(build, "load_images", gone)
    with pytest.warns(UserWarning, match="only embeddings are shown: no photos"):
        space = opened(run.folder)
    with pytest.raises(FileNotFoundError):
        space.open_image(0)
    assert space.proxies.class_names == names
    shutil.rmtree(run.folder / "index")
    with pytest.raises(FileNotFoundError, match="no photos"):
        opened(run.folder)


def test_read_only_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> None:
        raise UnwritableError("no space left")

    monkeypatch.setattr("proxygml.vectors.build_lock", full)
    with pytest.warns(UserWarning, match="no space left: the embeddings are not kept"):
        assert len(opened(run.folder))


def size_of(space: Space, number: int) -> tuple[int, int]:
    with space.open_image(number) as image:
        return image.size


def test_images_of_an_npz(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    space = opened(photos / "vectors.npz", data=photos / "photos")
    assert size_of(space, 0) == (300, 200)
    assert space.encoder is None
    assert "without their network" in space.no_upload
    assert opened(photos / "vectors.npz").open_image is None  # nothing there has such a path
    shutil.move(photos / "vectors.npz", photos / "photos" / "vectors.npz")
    assert size_of(opened(photos / "photos" / "vectors.npz"), 5) == (300, 200)
    monkeypatch.chdir(photos / "photos")
    assert size_of(opened(Path("vectors.npz")), 5) == (300, 200)


def test_npz_opens_no_file_outside_its_folder(photos: Path) -> None:
    folder, secret = photos / "photos", photos / "secret.png"
    Image.new("RGB", (5, 5)).save(secret)
    (folder / "link.png").symlink_to(secret)
    names = np.array(["red/0.jpg", "../secret.png", str(secret), "link.png", str(folder / "red/1.jpg")])
    np.savez(folder / "sent.npz", vectors=np.eye(5), labels=np.arange(5), paths=names)
    with pytest.warns(UserWarning, match="are not shown: name the folder that contains them with --data"):
        space = opened(folder / "sent.npz")
    assert size_of(space, 0) == size_of(space, 4) == (300, 200)
    for number in (1, 2, 3):
        with pytest.raises(PermissionError, match="lies outside"):
            space.open_image(number)
    with pytest.warns(UserWarning, match="are not shown"):  # ../secret.png
        space = opened(folder / "sent.npz", data=photos)
    assert size_of(space, 2) == (5, 5)


def test_npz_without_paths(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "own.npz", vectors=np.eye(4, dtype=np.float16), labels=np.array(["wren", "crow", "wren", "jay"])
    )
    space = opened(tmp_path / "own.npz")
    assert space.class_names == ["crow", "jay", "wren"]
    assert (space.paths[2], space.open_image, space.proxies) == ("2", None, None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist: expected the folder of a run, an .npz"),
        (lambda path: path.write_text("hello"), "does not contain embeddings"),
        (lambda path: np.savez(path.open("wb"), vectors=np.full((2, 2), np.nan), labels=np.arange(2)), "no NaN"),
        (lambda path: np.savez(path.open("wb"), vectors=np.empty((0, 2)), labels=np.arange(0)), "has no vectors"),
    ],
    ids=["absent", "text", "NaN", "empty"],
)
def test_invalid_file_is_one_line(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of the files that this test leaves to be closed
        make(tmp_path / "x.npz")
        with pytest.raises((ValueError, FileNotFoundError), match=message) as caught:
            opened(tmp_path / "x.npz")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_index_with_its_network(run: Run, tmp_path: Path) -> None:
    rows = Model(run).embed(build.load_images(run.recipe)[1])
    with pytest.raises(ValueError, match=r"a folder without recipe\.json or items\.sqlite"):
        opened(tmp_path)
    index = Index.create(tmp_path / "index", dim=rows.vectors.shape[1], model=rows.model, kind="exact")
    with pytest.raises(ValueError, match="is empty: add to it"):
        opened(tmp_path / "index")
    index.add(rows)
    space = opened(tmp_path / "index")
    np.testing.assert_allclose(space.vectors, rows.vectors, atol=1e-6)
    assert [space.class_names[c] for c in space.classes] == [rows.class_name(label) for label in rows.labels]
    assert space.encoder is None
    index.save_model(run.folder)
    space = opened(tmp_path / "index")
    image = build.load_images(run.recipe)[1].open(3)
    np.testing.assert_allclose(space.encoder.encode([image])[0], rows.vectors[3], atol=1e-5)
    assert space.subgraph_of(0).own_class is None
    assert space.proxies.class_names == opened(run.folder).proxies.class_names


def test_images_of_trained_classes_in_an_index_link_to_their_own_proxies(run: Run, tmp_path: Path) -> None:
    rows = Model(run).embed(build.load_images(run.recipe)[0])
    index = Index.create(tmp_path / "index", dim=rows.vectors.shape[1], model=rows.model, kind="exact")
    index.add(rows)
    index.save_model(run.folder)
    space = opened(tmp_path / "index")
    names = [space.class_names[number] for number in space.classes]
    trained = next(row for row, name in enumerate(names) if name in space.proxies.class_names)  # others are held out
    own = space.subgraph_of(trained).own_class
    assert space.proxies.class_names[own] == names[trained]


def test_network_with_other_names_than_proxies_shows_none(run: Run) -> None:
    best = run.load_best()
    run.save_best(best | {"class_names": best["class_names"][:-1]})
    assert opened(run.folder).proxies is None


def test_untrained_run(run: Run) -> None:
    (run.folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="train it first"):
        opened(run.folder)
    with pytest.raises(FileNotFoundError, match="train it first"):
        Model(run).encode([Image.new("RGB", (40, 40))])
