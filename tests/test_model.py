"""Models, what a path is, and search from photos to hits, in process and on the command line."""

import json
import os
import re
import shlex
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxygml import model
from proxygml.cli.main import main
from proxygml.data.folder import images_below
from proxygml.embeddings import Embeddings, embed
from proxygml.evaluation import neighbors
from proxygml.retrieval import Index, adding
from proxygml.training import build
from proxygml.training.run import Run
from proxygml.vectors import open_vectors


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Four photos in folders of two classes, one of them deeper, and one in no folder."""
    random = np.random.default_rng(0)
    folder = tmp_path / "my [photos]"
    for name in ("crow/1.png", "crow/2.png", "water/duck/1.png", "loose.png"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 255, (40, 40, 3), np.uint8)).save(folder / name)
    return folder


def run_command(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


def failure(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    """The last line on stderr of a command that fails."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    assert caught.value.code == 1
    return capsys.readouterr().err.strip().splitlines()[-1]


@pytest.fixture
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "index") if request.param == "folder" else request.getfixturevalue("new_database")


@pytest.mark.parametrize("location", ["folder", "postgres"], indirect=True)
@pytest.mark.slow
def test_index_and_search_photos(location: str, photos: Path, trained_run: Run, capsys: pytest.CaptureFixture) -> None:
    shown = run_command(capsys, "index", "build", photos, "--out", location, "--run", trained_run.folder)
    assert "4 new, 0 existing, 0 skipped" in shown
    assert "exact search finds 100.0 % of the 10 nearest" in shown
    asked = [photos / "crow" / "2.png", photos / "loose.png"]
    found = json.loads(run_command(capsys, "search", location, "--image", *asked, "-n", 3, "--json"))
    assert [entry["query"] for entry in found] == [str(path) for path in asked]
    assert [len(entry["hits"]) for entry in found] == [3, 3]
    assert [entry["hits"][0]["path"] for entry in found] == [str(path) for path in asked]
    assert [entry["hits"][0]["label"] for entry in found] == ["crow", "my [photos]"]
    assert [entry["hits"][0]["similarity"] for entry in found] == pytest.approx([1, 1])
    table = run_command(capsys, "search", location, "--image", asked[0], "-n", 2).splitlines()
    assert table[0].split() == ["distance", "similarity", "class", "nearest", "to", *str(asked[0]).split()]
    assert table[1].split() == ["0.000", "1.0000", "crow", *str(asked[0]).split()]
    assert len(table) == 3
    run_command(capsys, "index", "remove", location, asked[0])
    assert str(asked[0]) not in run_command(capsys, "search", location, "--image", asked[0]).split("\n", 1)[1]
    assert "1 new, 3 existing" in run_command(capsys, "index", "add", location, photos)  # by the network in the index


def test_index_has_the_vectors_of_the_model(photos: Path, trained_run: Run, tmp_path: Path, capsys) -> None:
    run_command(capsys, "index", "build", photos, "--out", tmp_path / "index", "--run", trained_run.folder)
    (block,) = Index.open(tmp_path / "index").blocks()
    expected = model.Model(trained_run).embed(images_below(photos))
    assert block.paths.tolist() == [str(photos / path) for path in expected.paths]
    np.testing.assert_allclose(block.vectors, expected.vectors, atol=1e-6)
    assert [block.class_name(label) for label in block.labels] == ["my [photos]", "crow", "crow", "water/duck"]


def test_interrupted_build_continues(photos: Path, trained_run: Run, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(adding, "BLOCK", 1)
    command = ["index", "build", photos, "--out", tmp_path / "index", "--run", trained_run.folder]
    add, added = Index.add, []

    def stop_at_the_third(index: Index, block: Embeddings) -> int:
        if len(added) == 2:
            raise KeyboardInterrupt
        added.append(block.paths.tolist())
        return add(index, block)

    monkeypatch.setattr(Index, "add", stop_at_the_third)
    with pytest.raises(SystemExit) as caught:
        main([str(word) for word in command])
    assert caught.value.code == 130
    monkeypatch.setattr(Index, "add", add)
    capsys.readouterr()
    assert "2 new, 2 existing, 0 skipped" in run_command(capsys, *command)
    assert "0 new, 4 existing, 0 skipped" in run_command(capsys, *command)


def test_broken_photos_are_skipped(photos: Path, trained_run: Run, tmp_path: Path, capsys) -> None:
    (photos / "crow" / "empty.jpg").write_bytes(b"")
    (photos / "crow" / "text.jpg").write_text("no image")
    whole = (photos / "crow" / "1.png").read_bytes()
    (photos / "crow" / "cut.png").write_bytes(whole[: len(whole) // 2])
    main([str(w) for w in ["index", "build", photos, "--out", tmp_path / "index", "--run", trained_run.folder]])
    shown = capsys.readouterr()
    assert "4 new, 0 existing, 3 skipped" in shown.out
    for name, reason in [("empty", "0 bytes"), ("text", "no known image format"), ("cut", "truncated")]:
        (line,) = [line for line in shown.err.splitlines() if f"crow/{name}" in line]
        assert line.startswith("skipped ")
        assert reason in line


def test_deleted_photo_is_reported(photos: Path, trained_run: Run, tmp_path: Path, capsys) -> None:
    run_command(capsys, "index", "build", photos, "--out", tmp_path / "index", "--run", trained_run.folder)
    (photos / "crow" / "1.png").unlink()
    main(["search", str(tmp_path / "index"), "--image", str(photos / "loose.png")])
    shown = capsys.readouterr()
    assert "crow/1.png" in shown.out
    (line,) = shown.err.splitlines()
    assert line.startswith(f"missing: 1 image, first {photos / 'crow' / '1.png'}: if they have moved")


def test_invalid_file_name_is_skipped(photos: Path, trained_run: Run, tmp_path: Path, capsys) -> None:
    shutil.copy(photos / "loose.png", os.fsencode(photos / "crow") + b"/caf\xe9.png")
    main([str(w) for w in ["index", "build", photos, "--out", tmp_path / "index", "--run", trained_run.folder]])
    shown = capsys.readouterr()
    assert "4 new, 0 existing, 1 skipped" in shown.out
    assert "its name is not valid Unicode: rename it" in shown.err


@pytest.fixture
def every_kind(tmp_path: Path, trained_run: Run, photos: Path) -> dict[str, object]:
    """One location of each kind."""
    np.savez(tmp_path / "vectors.npz", vectors=np.eye(3), labels=np.arange(3))
    Index.create(tmp_path / "index", dim=3)
    (tmp_path / "model.onnx").write_bytes(b"")
    model.Model(trained_run).export(tmp_path / "model")
    (tmp_path / "space").mkdir()
    (tmp_path / "space" / "space.json").write_text("{}")
    return {
        "run": trained_run.folder,
        "model": tmp_path / "model",
        "embeddings": tmp_path / "vectors.npz",
        "index": tmp_path / "index",
        "space": tmp_path / "space",
        "images": photos,
    }


def test_kind_of_a_path(every_kind: dict[str, object], tmp_path: Path) -> None:
    for kind, location in every_kind.items():
        assert model.kind_of(location) == kind
    assert model.kind_of("postgresql://me@server/photos?index=birds") == "index"
    with pytest.raises(FileNotFoundError, match=r"no does not exist: expected the folder of a run or an .npz of"):
        model.kind_of(tmp_path / "no", ("run", "embeddings"))
    with pytest.raises(ValueError, match=r"expected the folder of a run, got .*model, a model folder$"):
        model.kind_of(every_kind["model"], ("run",))
    for file in ("model.onnx", "model/model.safetensors"):
        with pytest.raises(ValueError, match=rf"or a model folder, got .*{file}, a file of a model: name its folder$"):
            model.kind_of(tmp_path / file, ("run", "model"))


@pytest.mark.parametrize(
    ("command", "accepted"),
    [
        (["search", "LOCATION", "--vectors", "queries.npz"], ("run", "model", "embeddings", "index")),
        (["evaluate", "LOCATION"], ("run", "model", "embeddings", "index")),
        (["browse", "LOCATION", "--no-open", "--port", "0"], ("run", "embeddings", "index")),
        (["index", "build", "LOCATION", "--out", "new"], ("embeddings", "images", "index", "run")),
        (["embed", "LOCATION", "--out", "new.npz"], ("run", "model", "images")),
        (["fit", "LOCATION", "--out", "new"], ("embeddings", "index")),
        (["transform", "LOCATION", "vectors.npz", "--out", "new.npz"], ("space",)),
        (["export", "LOCATION", "new"], ("run", "model")),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_kind_is_one_line(command: list, accepted: tuple, every_kind, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in every_kind.keys() - set(accepted):
        line = failure(capsys, *(every_kind[kind] if word == "LOCATION" else word for word in command))
        assert line.startswith(f"error: expected {model.KINDS[accepted[0]]}")
        assert str(every_kind[kind]) in line
    assert "does not exist: expected" in failure(capsys, *(w if w != "LOCATION" else "nowhere" for w in command))


def test_scores_of_a_model_folder(every_kind: dict, trained_run: Run, capsys: pytest.CaptureFixture) -> None:
    folder = every_kind["model"]
    before = sorted(folder.iterdir())
    assert json.loads(run_command(capsys, "evaluate", folder, "--json")) == trained_run.scores["trained"]
    assert sorted(path for path in folder.iterdir() if path.name != ".lock") == before  # no paths of this machine


def test_index_of_paths_has_no_labels(photos: Path, trained_run: Run) -> None:
    paths = sorted(map(str, photos.rglob("*.png")))
    assert model.load(trained_run.folder).index(paths).listing() == [(path, "") for path in paths]


class TestModel:
    def test_embedding_leaves_random_state_and_starts_no_fabric(self, trained_run: Run, photos, monkeypatch) -> None:
        def no_fabric(*_: object, **__: object) -> None:
            raise AssertionError("Fabric was created")

        monkeypatch.setattr("lightning_fabric.Fabric.__init__", no_fabric)
        state, seed = torch.get_rng_state(), os.environ.get("PL_GLOBAL_SEED")
        embedder = model.Model(trained_run.folder)
        vectors = embedder.embed(images_below(photos)).vectors
        encoded = embedder.encode([photos / "crow" / "1.png", Image.open(photos / "crow" / "2.png")])
        np.testing.assert_allclose(encoded, vectors[1:3], atol=1e-6)
        assert torch.equal(torch.get_rng_state(), state)
        assert os.environ.get("PL_GLOBAL_SEED") == seed

    def test_vectors_equal_those_of_training(self, trained_run: Run) -> None:
        recipe, images = trained_run.recipe, build.load_images(trained_run.recipe)[1]
        network = build.load_model(trained_run)
        expected = embed(network, build.test_crops(recipe, images), np.asarray(images.paths), batch_size=128)
        result = model.Model(trained_run).embed(images)
        np.testing.assert_array_equal(result.vectors, expected.vectors)
        assert result.model == trained_run.model_id

    def test_workers_and_batch_size(self, trained_run: Run, photos: Path, tmp_path: Path, capsys, monkeypatch) -> None:
        seen, loader = [], torch.utils.data.DataLoader

        def spy(dataset, *, batch_size: int, num_workers: int) -> object:
            seen.append((batch_size, num_workers))
            return loader(dataset, batch_size=batch_size)

        monkeypatch.setattr(torch.utils.data, "DataLoader", spy)
        options = ["--workers", 1, "--batch-size", 3, "--device", "cpu"]
        run_command(capsys, "embed", trained_run.folder, "--out", tmp_path / "test.npz", *options)
        index = ["index", "build", photos, "--out", tmp_path / "index", "--run", trained_run.folder]
        run_command(capsys, *index, *options)
        run_command(capsys, "search", tmp_path / "index", "--image", photos / "loose.png", "--batch-size", 2)
        assert seen == [(3, 1), (3, 1), (2, 0)]
        for option in (["--workers", -1], ["--batch-size", 0]):
            line = failure(capsys, "embed", trained_run.folder, "--out", tmp_path / "test.npz", *option)
            assert re.match(r"error: expected (workers of at least 0, got -1|batch_size of at least 1, got 0)$", line)

    def test_unreadable_file_is_named(self, trained_run: Run, tmp_path: Path) -> None:
        (tmp_path / "a.jpg").write_bytes(b"")
        with pytest.raises(ValueError, match=r"a.jpg cannot be read: "):
            model.Model(trained_run).encode([tmp_path / "a.jpg"])


class TestRun:
    @pytest.mark.slow
    def test_evaluate_and_index(self, trained_run: Run, tmp_path: Path, capsys) -> None:
        run = shutil.copytree(trained_run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("index*"))
        assert json.loads(run_command(capsys, "evaluate", run, "--json")) == trained_run.scores["trained"]
        items = sum(map(len, build.load_images(trained_run.recipe)))
        assert f"{items} new, 0 existing" in run_command(capsys, "index", "build", run, "--out", tmp_path / "index")
        assert Index.open(tmp_path / "index").model_folder() is not None

    @pytest.mark.slow
    def test_search_embeds_once(self, trained_run: Run, tmp_path: Path, capsys, monkeypatch) -> None:
        shutil.copytree(trained_run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("index"))
        run_command(capsys, "embed", tmp_path / "run", "--out", tmp_path / "test.npz")
        test = Embeddings.load(tmp_path / "test.npz")
        command = [
            "search",
            tmp_path / "run",
            "--vectors",
            tmp_path / "test.npz",
            "-n",
            "4",
            "--split",
            "test",
            "--json",
        ]
        found = json.loads(run_command(capsys, *command))
        assert len(found) == len(test.vectors)
        _, distances = neighbors(test.vectors, test.vectors, count=4)
        np.testing.assert_allclose([[h["distance"] for h in e["hits"]] for e in found], distances, atol=1e-5)
        own = dict(zip(test.paths.tolist(), test.labels.tolist(), strict=True))
        for entry in found:
            for hit in entry["hits"]:
                assert hit["label"] == test.class_name(own[hit["path"]])
        monkeypatch.setattr(model.Model, "embed", None)
        assert json.loads(run_command(capsys, *command)) == found

    @pytest.mark.slow
    def test_search_in_all_images(self, trained_run: Run, tmp_path: Path, capsys) -> None:
        shutil.copytree(trained_run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("index*"))
        train, test = build.load_images(trained_run.recipe)
        train.open(0).save(tmp_path / "query.png")
        main(["search", str(tmp_path / "run"), "--image", str(tmp_path / "query.png"), "-n", "1", "--json"])
        shown = capsys.readouterr()
        ((hit,),) = [entry["hits"] for entry in json.loads(shown.out)]
        assert hit["path"] == train.paths[0]
        assert f"{tmp_path / 'run'}: {len(train)} training images and {len(test)} test images" in shown.err

    def test_run_without_test_images(self, trained_run: Run, photos: Path, tmp_path: Path, monkeypatch) -> None:
        run = Run.open(shutil.copytree(trained_run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("index*")))
        (photos / "loose.png").unlink()
        monkeypatch.chdir(photos.parent)
        changes = {"dataset": "folder", "data": photos.name, "classes": None, "test_fraction": 0, "held_out": 0}
        run.write_recipe(run.recipe.changed(changes))
        monkeypatch.chdir("/")
        whole = open_vectors(run.folder)
        assert len(whole) == len(build.load_images(run.recipe)[0])
        with pytest.raises(ValueError, match="run has no test images: choose another --split"):
            open_vectors(run.folder, split="test")
        photos.rename(photos.with_name("moved"))
        assert len(open_vectors(run.folder)) == len(whole)  # they are cached
        error = f"the images of {run.folder} are not in {photos}: name their folder with --data"
        with pytest.raises(FileNotFoundError, match=re.escape(error)):
            model.Model(run).load_images()
        moved = photos.with_name("moved")
        paths = [str(moved / Path(path).relative_to(photos)) for path in next(whole.blocks()).paths]
        for data in (moved, None):  # once told, the index knows
            again = open_vectors(run.folder, data=data)
            assert next(again.blocks()).paths.tolist() == paths

    @pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
    def test_device(self, trained_run: Run) -> None:
        assert model.Model(trained_run, device="auto").device.type == "cpu"
        with pytest.raises(ValueError, match="device cuda is not available: use --device cpu or auto"):
            model.Model(trained_run, device="cuda")

    def test_changed_network_is_embedded_again(self, trained_run: Run, tmp_path: Path) -> None:
        shutil.copytree(trained_run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("index"))
        before = open_vectors(tmp_path / "run", split="test")
        run = Run.open(tmp_path / "run")
        state = run.load_best()
        state["model"] = {name: value * 1.5 for name, value in state["model"].items()}
        run.save_best(state)
        after = open_vectors(tmp_path / "run", split="test")
        assert before.model != after.model == run.model_id
        assert len(after) > 0

    @pytest.fixture
    def sent(self, trained_run: Run, tmp_path: Path) -> Path:
        """A run with an index of another network in a folder of the user."""
        run = shutil.copytree(trained_run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("index"))
        Index.create(tmp_path / "mine", dim=64, model="other").close()
        (tmp_path / "mine" / "photo.jpg").touch()
        return run

    def test_linked_index_is_not_erased(self, sent: Path, tmp_path: Path) -> None:
        (sent / "index").symlink_to(tmp_path / "mine")
        with pytest.raises(ValueError, match="run/index is a link: remove it, and the index is built again"):
            open_vectors(sent, split="test")
        assert {path.name for path in (tmp_path / "mine").iterdir()} == {"items.sqlite", "photo.jpg"}

    @pytest.mark.slow
    def test_stale_index_with_other_files_is_not_erased(self, sent: Path, tmp_path: Path) -> None:
        (tmp_path / "mine").rename(sent / "index")
        with pytest.raises(FileExistsError, match=r"run/index/photo.jpg does not belong to an index, .* elsewhere"):
            open_vectors(sent, split="test")
        (sent / "index" / "photo.jpg").rename(tmp_path / "photo.jpg")
        assert len(open_vectors(sent, split="test"))

    @pytest.mark.slow
    def test_interrupted_cache_is_completed(self, trained_run: Run, tmp_path: Path, monkeypatch) -> None:
        shutil.copytree(trained_run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("index"))
        whole = open_vectors(tmp_path / "run", split="test")
        count = len(whole)
        whole.remove(next(whole.blocks()).paths[:5])
        whole.set_metadata("complete", "no")
        embed, embedded = model.Model.embed, []

        def counted(self: model.Model, images, *_: object) -> Embeddings:
            embedded.append(len(images))
            return embed(self, images)

        monkeypatch.setattr(model.Model, "embed", counted)
        assert (len(open_vectors(tmp_path / "run", split="test")), embedded) == (count, [5])


class TestVectors:
    @pytest.fixture
    def own(self, tmp_path: Path) -> Path:
        np.savez(tmp_path / "own.npz", vectors=np.eye(5, 3) + 0.1, labels=np.array(["a", "b", "a", "b", "a"]))
        return tmp_path / "own.npz"

    def test_search_in_npz_and_index(self, own: Path, tmp_path: Path, capsys) -> None:
        assert "5 items in" in run_command(capsys, "index", "build", own, "--out", tmp_path / "index")
        for place in (own, tmp_path / "index"):
            found = json.loads(run_command(capsys, "search", place, "--vectors", own, "-n", "2", "--json"))
            assert [entry["hits"][0] for entry in found[:3]] == [
                {"path": str(n), "label": "ab"[n % 2], "distance": 0, "similarity": pytest.approx(1), "id": n + 1}
                for n in range(3)
            ]
            assert "distance" in run_command(capsys, "search", place, "--vectors", own)

    def test_queries_of_another_length(self, tmp_path: Path, capsys) -> None:
        np.savez(tmp_path / "axes.npz", vectors=np.eye(3), labels=np.arange(3))
        np.savez(tmp_path / "raw.npz", vectors=10 * np.eye(3)[:1], labels=np.arange(1))
        command = ["search", tmp_path / "axes.npz", "--vectors", tmp_path / "raw.npz"]
        lines = run_command(capsys, *command).splitlines()
        assert [line.split()[:2] for line in lines[:2]] == [["distance", "similarity"], ["9.000", "1.0000"]]
        ((first, *_),) = [entry["hits"] for entry in json.loads(run_command(capsys, *command, "--json"))]
        assert (first["similarity"], first["distance"]) == (1, 9)

    @pytest.mark.slow
    def test_copy_between_indexes(self, own: Path, tmp_path: Path, new_database: str, capsys) -> None:
        run_command(capsys, "index", "build", own, "--out", tmp_path / "index")
        shown = run_command(capsys, "index", "build", tmp_path / "index", "--out", new_database, "--kind", "hnsw")
        assert "5 new, 0 existing" in shown
        assert "hnsw search finds 100.0 %" in shown
        run_command(capsys, "index", "build", new_database, "--out", tmp_path / "back")
        assert len(Index.open(tmp_path / "back")) == 5

    def test_no_line_shows_a_password(self, own: Path, tmp_path: Path, new_database: str, photos, capsys) -> None:
        url = new_database.replace("postgres:@", "postgres:secret@", 1)
        assert url != new_database
        run_command(capsys, "index", "build", own, "--out", url)
        shutil.copy(own, tmp_path / "other.npz")
        for command in (
            ["index", "build", tmp_path / "other.npz", "--out", url],
            ["index", "build", own, "--out", url, "--kind", "hnsw"],
            ["index", "build", tmp_path / "no", "--out", url],
            ["index", "add", url, photos],
            ["search", url, "--image", photos / "loose.png"],
            ["search", own, "--image", photos / "loose.png", "--run", url],
            ["search", url + "2", "--vectors", own],
            ["embed", url, "--out", tmp_path / "new.npz"],
            ["export", url, tmp_path / "new"],
        ):
            assert "secret" not in failure(capsys, *command)
        for command in (
            ["evaluate", url, "--no-cluster"],
            ["index", "info", url],
            ["index", "build", url, "--out", tmp_path / "i"],
        ):
            assert "secret" not in run_command(capsys, *command)
        with pytest.raises(ValueError, match="expected the folder of a run or a model folder, got") as caught:
            model.Model(url)
        assert "secret" not in str(caught.value)

    def test_info(self, own: Path, tmp_path: Path, capsys) -> None:
        run_command(capsys, "index", "build", own, "--out", tmp_path / "index")
        known = json.loads(run_command(capsys, "index", "info", tmp_path / "index", "--json"))
        assert (known["items"], known["classes"], known["dim"], known["recall@10"]) == (5, 2, "3", 1)
        assert "kind            exact" in run_command(capsys, "index", "info", tmp_path / "index")

    def test_index_of_another_source_is_kept(self, own: Path, tmp_path: Path, capsys) -> None:
        run_command(capsys, "index", "build", own, "--out", tmp_path / "index")
        shutil.copy(own, tmp_path / "other.npz")
        line = failure(capsys, "index", "build", tmp_path / "other.npz", "--out", tmp_path / "index")
        assert line == f"error: {tmp_path / 'index'} is an index of {own}: `proxygml index add` adds to it"
        line = failure(capsys, "index", "build", own, "--out", tmp_path / "index", "--kind", "hnsw")
        assert "was started as exact, not hnsw: name another --out" in line

    def test_photo_needs_the_network(self, own: Path, photos: Path, trained_run, capsys) -> None:
        line = failure(capsys, "search", own, "--image", photos / "loose.png")
        assert line == f"error: {own} does not contain the network of its vectors: name its run with --run RUN"
        line = failure(capsys, "search", own, "--image", photos / "loose.png", "--run", trained_run.folder)
        assert f"{own} has vectors of an unknown model, these are of model {trained_run.model_id}" in line

    @pytest.mark.slow
    def test_network_by_option_or_from_the_index(self, trained_run: Run, photos: Path, tmp_path: Path, capsys) -> None:
        run_command(capsys, "embed", trained_run.folder, "--out", tmp_path / "test.npz")
        command = ["--image", photos / "loose.png", "-n", "1"]
        by_name = run_command(capsys, "search", tmp_path / "test.npz", *command, "--run", trained_run.folder)
        run = ["--run", trained_run.folder]
        run_command(capsys, "index", "build", tmp_path / "test.npz", "--out", tmp_path / "index", *run)
        assert run_command(capsys, "search", tmp_path / "index", *command) == by_name

    @pytest.mark.parametrize(
        ("arrays", "words"),
        [
            ({"vectors": np.full((2, 3), np.nan)}, "expected finite vectors (no NaN"),
            ({"vectors": np.ones((2, 0))}, "does not contain embeddings: vectors of shape (2, 0) has no bytes"),
            ({"vectors": np.ones((0, 3)), "labels": np.zeros(0, int)}, "is empty"),
            ({"vectors": np.ones(2)}, "expected vectors as floats (M, D)"),
        ],
    )
    def test_invalid_vectors_are_one_line(self, arrays: dict, words: str, tmp_path: Path, capsys) -> None:
        np.savez(tmp_path / "bad.npz", **{"labels": np.zeros(2, int), **arrays})
        assert words in failure(capsys, "index", "build", tmp_path / "bad.npz", "--out", tmp_path / "index")
        assert not (tmp_path / "index").exists()


class TestMistakes:
    @pytest.mark.slow
    def test_one_line(self, photos: Path, trained_run: Run, tmp_path: Path, capsys) -> None:
        run = shutil.copytree(trained_run.folder, tmp_path / "run")
        (tmp_path / "empty").mkdir()
        for arguments, words in [
            (["search", run], "expected something to search for: --image PHOTO ..., or --vectors"),
            (
                ["search", tmp_path / "no", "--image", "a.jpg"],
                "no does not exist: expected the folder of a run",
            ),
            (["search", run, "--image", tmp_path / "no.jpg"], "no.jpg cannot be read: missing: no such file"),
            (["search", run, "--image", photos / "loose.png", "-n", 0], "expected to find 1 item or more, got 0"),
            (
                ["index", "build", photos, "--out", tmp_path / "i"],
                "images need --run RUN, a trained run",
            ),
            (["index", "build", tmp_path / "no", "--out", tmp_path / "i"], "does not exist: expected an .npz"),
            (["index", "build", tmp_path / "empty", "--out", tmp_path / "i", "--run", run], "no images below"),
            (["index", "build", "--dataset", "glyphs", "--out", tmp_path / "i"], "images need --run RUN"),
            (["index", "add", tmp_path / "no", photos], "no items.sqlite in"),
            (["index", "build", photos, "--out", run, "--run", run], "exists already: name a new folder"),
        ]:
            assert words in failure(capsys, *arguments)
            assert not (tmp_path / "i").exists()

    def test_other_network_is_refused(self, photos: Path, trained_run: Run, tmp_path: Path, capsys) -> None:
        shutil.copytree(trained_run.folder, tmp_path / "run")
        other = Run.open(tmp_path / "run")
        best = other.load_best()
        other.save_best({**best, "loss": {"proxies": best["loss"]["proxies"] + 1}})
        run_command(capsys, "index", "build", photos, "--out", tmp_path / "index", "--run", trained_run.folder)
        line = failure(capsys, "index", "add", tmp_path / "index", photos, "--run", other.folder)
        assert f"these are of model {other.model_id}: embed them with the same model" in line

    def test_no_readable_photo(self, tmp_path: Path, trained_run: Run, capsys) -> None:
        (tmp_path / "photos").mkdir()
        (tmp_path / "photos" / "a.jpg").write_bytes(b"")
        command = ["index", "build", tmp_path / "photos", "--out", tmp_path / "index", "--run", trained_run.folder]
        assert "1 image skipped, none can be read" in failure(capsys, *command)


def test_index_of_a_dataset(trained_run: Run, tmp_path: Path, photos: Path, capsys) -> None:
    options = ["--dataset", "folder", "--data", photos, "--split", "train"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the photo in no folder
        main([str(o) for o in ["index", "build", *options, "--out", tmp_path / "index", "--run", trained_run.folder]])
    paths = next(Index.open(tmp_path / "index").blocks()).paths
    assert 0 < len(paths) < 4
    assert all(Path(path).is_file() for path in paths)


@pytest.mark.slow
def test_commands_in_docs_search_work(
    photos: Path, trained_run: Run, tmp_path: Path, new_database: str, monkeypatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(photos, tmp_path / "PHOTOS")
    shutil.copytree(photos / "crow", tmp_path / "PHOTOS" / "owl")
    shutil.copytree(photos / "crow", tmp_path / "MORE_PHOTOS" / "crow")
    shutil.copy(photos / "loose.png", tmp_path / "new.jpg")
    for name in ("mine", "nested"):
        shutil.copytree(trained_run.folder, tmp_path / "runs" / name)
    page = (Path(__file__).parents[1] / "docs" / "search.md").read_text()
    page = page.replace("--prefix 64", f"--prefix {trained_run.recipe.embedding_dim // 2}")
    blocks = re.findall(r"```\n(proxygml .*?)```", page, flags=re.DOTALL)
    commands = [shlex.split(line, comments=True)[1:] for block in blocks for line in block.splitlines()]
    assert len(commands) >= 10
    for command in commands:
        if command[0] != "train":  # its run exists already
            main([word.replace("postgresql://team@server/photos?index=birds", new_database) for word in command])
    capsys.readouterr()
    assert (len(Index.open("my-index")), len(Index.open("larger")), len(Index.open(new_database))) == (5, 5, 8)


def test_pipe_is_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"a\.npz is a pipe or device: expected a file"):
        model.kind_of(tmp_path / "a.npz")
