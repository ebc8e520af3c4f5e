"""Exported networks: equal to PyTorch, run without it, and nothing is written when anything is wrong."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxygml.backbones import BACKBONES
from proxygml.cli.main import main
from proxygml.embeddings import Embeddings
from proxygml.export import onnx
from proxygml.export.onnx import largest_difference
from proxygml.files import one_line
from proxygml.model import Model
from proxygml.training import build
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run
from tests.backbones.test_transformers import tiny as tiny_hub_model
from tests.cli.test_cli import failure

pytest.importorskip("onnxscript", reason='onnxscript is not installed: pip install "proxygml[export]"')
pytest.importorskip("onnxruntime", reason='onnxruntime is not installed: pip install "proxygml[export]"')

# Same code as a smaller network; googlenet is exported with three heads, convnet as the trained run.
SAME_CODE = {"resnet50", "efficientnet-lite1", "efficientnet-lite2", "googlenet", "convnet"}
ONLY = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in "proxygml torch lightning_fabric scipy sklearn matplotlib faiss".split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = sys.argv[1:]
sys.path[0] = sys.argv[0].rpartition("/")[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def untrained(folder: Path, **settings: object) -> Run:
    """A run with an untrained network, without images."""
    recipe = Recipe(**{"dataset": "folder", "data": "nowhere", "image_size": 64, "embedding_dim": 12} | settings)
    torch.manual_seed(0)
    run = Run.create(folder, recipe)
    run.save_best({"model": build.build_model(recipe).state_dict(), "loss": {}, "epoch": 1, "class_names": []})
    return run


@torch.no_grad()
def differences(run: Run, folder: Path) -> list[float]:
    """Largest difference from the run's embeddings for batches of 5 and 1."""
    import onnxruntime

    size = run.recipe.image_size
    images = np.random.default_rng(1).integers(0, 256, (5, 3, size, size), dtype=np.uint8)
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    expected = build.load_model(run)(torch.from_numpy(images)).numpy()
    return [np.abs(session.run(None, {"images": images[:count]})[0] - expected[:count]).max() for count in (5, 1)]


def exported(run: Run, folder: Path) -> dict:
    """The preprocessing.json of an export with ONNX."""
    Model(run).export(folder, onnx=True)
    return json.loads((folder / "preprocessing.json").read_text())


def photos(folder: Path) -> list[Path]:
    """A large JPEG, a transparent PNG, a rotated JPEG and a gray image of 16 bits."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (50, 70, 4), dtype=np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6
    folder.mkdir()
    Image.fromarray(pixels[..., :3]).resize((700, 500)).save(folder / "large.jpg")
    Image.fromarray(pixels).save(folder / "transparent.png")
    Image.fromarray(pixels[..., :3]).save(folder / "turned.jpg", exif=turned)
    Image.fromarray(pixels[..., 0].astype(np.uint16) * 257).save(folder / "deep.png")
    return sorted(folder.iterdir())


@pytest.mark.slow
def test_exported_network_equals_run(exported_folder: Path, trained_run: Run) -> None:
    assert max(differences(trained_run, exported_folder)) < 1e-4
    files = {"model.onnx", "preprocessing.json", "decoding.py", "embed.py", "LICENSE-scripts", "README.md"}
    files |= {"model.safetensors", "recipe.json", "scores.json", "curves.png", "map.png", "retrieval.png"}
    assert {path.name for path in exported_folder.iterdir()} - {"__pycache__"} == files


def test_settings_and_readme_describe_the_network(exported_folder: Path, trained_run: Run) -> None:
    import onnxruntime

    settings = json.loads((exported_folder / "preprocessing.json").read_text())
    assert (settings["model"], settings["image_size"]) == (trained_run.model_id, 32)
    assert (settings["crop_fraction"], settings["embedding_dim"], settings["unit_length"]) == (1.0, 128, True)
    assert settings["compared_with"] == "32 test images of the run"
    assert settings["largest_difference"] < 1e-4
    session = onnxruntime.InferenceSession(exported_folder / "model.onnx")
    described = [f"`{end.name}`" for end in (*session.get_inputs(), *session.get_outputs())]
    readme = (exported_folder / "README.md").read_text()
    assert all(words in readme for words in (*described, "128 numbers", "(B, 3, 32, 32)", "a dot product is a cosine"))


@pytest.mark.slow
@pytest.mark.parametrize("backbone", sorted(BACKBONES.keys() - SAME_CODE))
def test_every_backbone_is_exported(backbone: str, tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", backbone=backbone, pooling="average+max")
    settings = exported(run, tmp_path / "out")
    assert max(differences(run, tmp_path / "out")) < 1e-4
    assert settings["compared_with"].startswith("32 images of noise")


@pytest.mark.slow
def test_three_heads_are_exported(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", backbone="googlenet", loss="hdc")
    settings = exported(run, tmp_path / "out")
    assert max(differences(run, tmp_path / "out")) < 1e-4
    assert not settings["unit_length"]  # the third head counts double
    assert "cosine" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["dinov2", "convnextv2"])  # vectors, and maps
def test_hub_models_are_exported(model_type: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    tiny_hub_model(transformers, model_type).save_pretrained(tmp_path / "hub")
    run = untrained(tmp_path / "run", backbone=f"hf:{tmp_path / 'hub'}")
    exported(run, tmp_path / "out")
    assert max(differences(run, tmp_path / "out")) < 1e-4


def test_long_embeddings_are_compared_at_unit_length() -> None:
    images, model = torch.zeros(2, 1), torch.nn.Module()
    model.forward = lambda batch: torch.full((len(batch), 1), 1000.0)
    assert largest_difference(lambda batch: torch.full((len(batch), 1), 1001.0), model, images) == pytest.approx(1e-3)
    model.forward = lambda batch: torch.full((len(batch), 1), 0.1)
    assert largest_difference(lambda batch: torch.full((len(batch), 1), 0.3), model, images) == pytest.approx(0.2)


class TestScript:
    def run(self, *command: object) -> str:
        done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    @pytest.mark.slow
    def test_without_torch_and_proxygml(self, exported_folder: Path, trained_run: Run, tmp_path: Path) -> None:
        files = photos(tmp_path / "photos")
        script = [sys.executable, "-W", "error", "-c", ONLY, exported_folder / "embed.py", *files]
        self.run(*script, "--out", tmp_path / "vectors.npz")
        result = Embeddings.load(tmp_path / "vectors.npz")
        np.testing.assert_allclose(result.vectors, Model(trained_run).encode(files), atol=1e-4)
        assert result.paths.tolist() == [str(file) for file in files]
        assert [result.class_name(label) for label in result.labels] == ["photos"] * len(files)
        assert result.model == trained_run.model_id
        printed = [line.split() for line in self.run(*script).splitlines()]
        assert [line[0] for line in printed] == result.paths.tolist()
        np.testing.assert_allclose([[float(x) for x in line[1:]] for line in printed], result.vectors, atol=1e-6)


class TestErrors:
    """Each is one line on stderr and leaves no file behind."""

    @pytest.mark.slow
    def test_large_difference_is_not_saved(
        self, trained_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        read = onnx._read
        monkeypatch.setattr(onnx, "_read", lambda path: lambda images: read(path)(images) + 1e-3)
        (tmp_path / "preprocessing.json").write_text("earlier export")
        code, line = failure(capsys, "export", trained_run.folder, tmp_path, "--onnx")
        assert code == 1
        assert "as ONNX differs from PyTorch by 1.0e-03 on 32 test images of the run" in line
        assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [
            ("preprocessing.json", "earlier export")
        ]

    @pytest.mark.slow
    def test_nan_network_is_not_saved(self, trained_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnx, "largest_difference", lambda *_: float("nan"))
        with pytest.raises(ValueError, match="differs from PyTorch by nan"):
            exported(trained_run, tmp_path)
        assert not list(tmp_path.iterdir())

    def test_failing_exporter_is_one_line(
        self, trained_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("\x1b[96madvice to developers") from KeyError("no such operator\nand pages of more")

        monkeypatch.setattr(onnx, "_export", fail)
        with pytest.raises(ValueError, match=r"^convnet cannot be exported: 'no such operator"):
            exported(trained_run, tmp_path)
        assert not list(tmp_path.iterdir())

    def test_network_too_large_for_onnx(
        self, trained_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(onnx, "MAX_ONNX_BYTES", 1000)
        with pytest.raises(ValueError, match=r"weights take .* GB, the limit of ONNX is 2 GB"):
            exported(trained_run, tmp_path)

    def test_other_files_are_kept(self, trained_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        readme = tmp_path / "README.md"
        readme.write_text("mine")
        for out in (tmp_path, readme, trained_run.folder):
            code, line = failure(capsys, "export", trained_run.folder, out)
            assert code == 1
            assert line == f"error: expected a new or empty folder, or an earlier export, got {out}"
        assert readme.read_text() == "mine"

    def test_run_without_weights(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        Run.create(tmp_path / "run", Recipe())
        code, line = failure(capsys, "export", tmp_path / "run", tmp_path / "out")
        assert code == 1
        assert "no model.safetensors" in line
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("library", ["onnxscript", "onnxruntime"])
    def test_missing_library(
        self, trained_run: Run, tmp_path: Path, library: str, monkeypatch, capsys: pytest.CaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, library, None)
        code, line = failure(capsys, "export", trained_run.folder, tmp_path / "out", "--onnx")
        assert code == 1
        assert line == f'error: export --onnx needs {library}: pip install "proxygml[export]"'
        assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_moved_photos_are_compared_again(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = untrained(tmp_path / "run", backbone="convnet")
    for name in "abcd":
        photos(tmp_path / name)
    main(["export", str(run.folder), str(tmp_path / "out"), "--onnx"])
    shown = capsys.readouterr()
    assert "images of noise, since the run's images cannot be read" in one_line(shown.out)
    missing = (
        f"comparing on noise: the images of {run.folder} are not in {run.recipe.data}: name their folder with --data"
    )
    assert missing in one_line(shown.err)
    for name in "abcd":
        (tmp_path / "moved").mkdir(exist_ok=True)
        (tmp_path / name).rename(tmp_path / "moved" / name)
    main(["export", str(run.folder), str(tmp_path / "out"), "--data", str(tmp_path / "moved"), "--onnx"])
    assert "8 test images of the run" in one_line(capsys.readouterr().out)
