"""Model folders: they open anywhere, their card is true, and other versions are refused in one line."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import proxygml
from proxygml.cli.main import main
from proxygml.export.folder import FORMAT
from proxygml.model import Model
from proxygml.training.run import Run
from tests.backbones.test_transformers import tiny as tiny_hub_model
from tests.cli.test_cli import failure
from tests.export.test_export import untrained

IMAGES = np.random.default_rng(0).integers(0, 256, (5, 40, 50, 3), np.uint8)


@pytest.fixture
def folder(trained_run: Run, tmp_path: Path) -> Path:
    """A model folder, written by the command."""
    main(["export", str(trained_run.folder), str(tmp_path / "model"), "--license", "mit"])
    return tmp_path / "model"


def test_folder_equals_run(folder: Path, trained_run: Run) -> None:
    model = proxygml.load(folder)
    np.testing.assert_array_equal(model.encode(IMAGES), Model(trained_run).encode(IMAGES))
    assert model.model_id == trained_run.model_id
    assert model.run.scores["trained"] == trained_run.scores["trained"]
    assert model.recipe == trained_run.recipe


def test_code_of_the_card_runs(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(folder)
    for name in ("photo.jpg", "other.jpg"):
        Image.fromarray(IMAGES[0]).save(name)
    card = Path("README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    exec(code, {})
    printed = np.array([float(number) for number in re.findall(r"[\d.]+", capsys.readouterr().out)])
    np.testing.assert_allclose(printed, 1, atol=1e-5)


def test_card_has_scores_pictures_and_license(folder: Path, trained_run: Run) -> None:
    card = (folder / "README.md").read_text()
    for row in ("trained", "untrained", "pixels"):
        assert f" | {100 * trained_run.scores[row]['recall@1']:.1f} | " in card
    pictures = re.findall(r"!\[.*\]\((.*)\)", card)
    assert sorted(pictures) == ["curves.png", "map.png", "retrieval.png"]
    assert all((folder / name).is_file() for name in pictures)
    assert "license: mit\n---" in card
    assert "Of the weights: mit." in card


def test_no_path_of_this_machine_travels(trained_run: Run, tmp_path: Path) -> None:
    run = Run.open(shutil.copytree(trained_run.folder, tmp_path / "run"))
    changes = {"dataset": "folder", "data": "secret/data", "cache": "secret/cache", "weights": "secret/w.pth"}
    run.write_recipe(run.recipe.changed(changes))
    run.write_scores(run.scores | {"made_by": {"command": "train --data secret", "proxygml": "0"}})
    Model(run).export(tmp_path / "model")
    texts = [path.read_bytes() for path in (tmp_path / "model").iterdir() if path.suffix in (".json", ".md")]
    assert len(texts) == 4
    assert not any(b"secret" in text or str(tmp_path).encode() in text for text in texts)
    assert Run.open(tmp_path / "model").recipe.weights == "w.pth"


@pytest.mark.slow
def test_commands_take_a_model_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "photos" / "owl").mkdir(parents=True)
    photo = tmp_path / "photos" / "owl" / "1.png"
    Image.fromarray(IMAGES[0]).save(photo)
    main(["index", "build", str(photo.parent), "--out", str(tmp_path / "index"), "--run", str(folder)])
    capsys.readouterr()
    main(["search", str(tmp_path / "index"), "--image", str(photo), "--json"])
    assert json.loads(capsys.readouterr().out)[0]["hits"][0]["path"] == str(photo)
    np.testing.assert_array_equal(proxygml.load(tmp_path / "index").encode([photo]), Model(folder).encode([photo]))


def test_network_without_scores(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", backbone="convnet", image_size=32)
    Model(run).export(tmp_path / "model")
    assert "The network was not scored." in (tmp_path / "model" / "README.md").read_text()
    assert proxygml.load(tmp_path / "model").encode(IMAGES).shape == (5, 12)


@pytest.mark.slow
def test_network_of_a_gpu_opens_on_a_cpu(trained_run: Run, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run = Run.open(shutil.copytree(trained_run.folder, tmp_path / "run", ignore=shutil.ignore_patterns("index*")))
    run.write_recipe(run.recipe.changed({"device": "cuda", "precision": "16-mixed"}))
    Model(run).export(tmp_path / "model")
    for place in (run.folder, tmp_path / "model"):
        model = proxygml.load(place)
        assert model.device.type == "cpu"
        np.testing.assert_allclose(model.encode(IMAGES), Model(trained_run).encode(IMAGES), atol=0.01)


@pytest.mark.slow
def test_export_again_removes_what_is_outdated(exported_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    again = shutil.copytree(exported_folder, tmp_path / "model", ignore=shutil.ignore_patterns("__pycache__"))
    before = Model(again).encode(IMAGES)
    Model(again).export(again)
    left = {path.name for path in exported_folder.iterdir()} - {path.name for path in again.iterdir()}
    assert left - {"__pycache__"} == {"model.onnx", "embed.py", "decoding.py", "LICENSE-scripts"}
    np.testing.assert_array_equal(Model(again).encode(IMAGES), before)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["dinov2", "clip_vision_model", "convnextv2"])
def test_hub_model_needs_no_download(model_type: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    hub = tmp_path / "hub"
    tiny_hub_model(transformers, model_type).save_pretrained(hub)
    statistics = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (hub / "preprocessor_config.json").write_text(json.dumps(statistics))
    run = untrained(tmp_path / "run", backbone=f"hf:{hub}", image_size=32)
    expected = Model(run).encode(IMAGES)
    Model(run).export(tmp_path / "model")
    shutil.rmtree(hub)
    shutil.rmtree(run.folder)
    np.testing.assert_array_equal(proxygml.load(tmp_path / "model").encode(IMAGES), expected)
    proxygml.load(tmp_path / "model").export(tmp_path / "again")
    np.testing.assert_array_equal(proxygml.load(tmp_path / "again").encode(IMAGES), expected)


def test_model_folder_is_no_run(folder: Path, capsys: pytest.CaptureFixture) -> None:
    code, line = failure(capsys, "train", "--resume", folder)
    assert code == 1
    assert "is an exported model, which cannot be resumed" in line


def change(path: Path, **values: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_newer_folder_is_one_line(folder: Path, capsys: pytest.CaptureFixture) -> None:
    message = rf"model is of proxygml 7\.1, which {proxygml.__version__} cannot read: upgrade proxygml$"
    change(folder / "recipe.json", new_setting=1)
    with pytest.raises(ValueError, match=r"recipe\.json is not a recipe: a recipe has no setting 'new_setting'"):
        proxygml.load(folder)
    change(folder / "preprocessing.json", proxygml="7.1")
    with pytest.raises(ValueError, match=message):
        proxygml.load(folder)
    change(folder / "preprocessing.json", format=FORMAT + 1)
    (folder / "recipe.json").unlink()
    code, line = failure(capsys, "index", "build", folder.parent, "--out", folder.parent / "i", "--run", folder)
    assert code == 1
    assert re.search(message, line)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"proxygml": "1", "format": null}', '{"format": "x"}'])
def test_damaged_folder_is_one_line(folder: Path, text: str) -> None:
    (folder / "preprocessing.json").write_text(text)
    with pytest.raises(ValueError, match=r"preprocessing\.json is damaged \(.*\): export the model again$") as caught:
        proxygml.load(folder)
    assert "\n" not in str(caught.value)
