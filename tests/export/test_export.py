"""Exported networks: equal to PyTorch, described, run without torch, and rejected when anything is wrong."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxygml.backbones import BACKBONES
from proxygml.cli.main import main
from proxygml.embeddings import Embeddings
from proxygml.export import write
from proxygml.export.runtime import VERSION, Description, read_description
from proxygml.export.write import FORMATS, export_run, load_network
from proxygml.training import build
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run
from tests.backbones.test_transformers import MODEL_TYPES
from tests.backbones.test_transformers import tiny as tiny_hub_model
from tests.cli.test_cli import failure

pytest.importorskip("onnxscript", reason='onnxscript is not installed: pip install "proxygml[export]"')
pytest.importorskip("onnxruntime", reason='onnxruntime is not installed: pip install "proxygml[export]"')

# Same code as a smaller network; googlenet is exported with three heads.
SAME_CODE = {"resnet50", "efficientnet-lite1", "efficientnet-lite2", "googlenet"}
NO_TORCH = """
import sys

class Missing:
    names = "torch lightning_fabric safetensors faiss sklearn scipy matplotlib onnx onnxscript".split()

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from proxygml.cli.main import main
main()
"""


def untrained(folder: Path, **settings: object) -> Run:
    """A run with an untrained network, without images."""
    recipe = Recipe(**{"dataset": "folder", "data": "nowhere", "image_size": 64, "embedding_dim": 12} | settings)
    torch.manual_seed(0)
    run = Run.create(folder, recipe)
    run.save_best({"model": build.build_model(recipe).state_dict()})
    return run


@torch.no_grad()
def differences(run: Run, path: Path, format: str) -> list[float]:
    """Largest difference from the run's embeddings for batches of 5 and 1, with each format's own reader."""
    size = run.recipe.image_size
    images = torch.from_numpy(np.random.default_rng(1).integers(0, 256, (5, 3, size, size), dtype=np.uint8))
    match format:
        case "onnx":
            import onnxruntime

            session = onnxruntime.InferenceSession(path)

            def network(batch: torch.Tensor) -> torch.Tensor:
                return torch.from_numpy(session.run(None, {"images": batch.numpy()})[0])

        case "safetensors":
            network = load_network(path)
        case "torch-export":
            network = torch.export.load(path).module()
    expected = build.load_model(run)(images)
    return [(network(images[:count]) - expected[:count]).abs().max().item() for count in (5, 1)]


def photos(folder: Path, *, broken: bool = False) -> Path:
    """Six classes of three photos: a large JPEG, a transparent PNG, and a rotated JPEG."""
    rng = np.random.default_rng(0)
    for number in range(6):
        class_folder = folder / f"class{number}"
        class_folder.mkdir(parents=True)
        images = [Image.fromarray(rng.integers(0, 256, (50, 70, 4), dtype=np.uint8)) for _ in range(3)]
        images[0].convert("RGB").resize((700, 500)).save(class_folder / "large.jpg")
        images[1].save(class_folder / "transparent.png")
        exif = Image.Exif()
        exif[0x0112] = 6
        images[2].convert("RGB").save(class_folder / "turned.jpg", exif=exif)
        if broken:
            (class_folder / "cut.png").write_bytes((class_folder / "transparent.png").read_bytes()[:80])
    return folder


@pytest.mark.parametrize("format", FORMATS)
def test_exported_network_equals_run(exported_files: Path, trained_run: Run, format: str) -> None:
    path = exported_files / f"model{FORMATS[format].suffix}"
    assert max(differences(trained_run, path, format)) < 1e-4
    description = read_description(path, format)
    assert (description.model, description.image_size, description.crop_fraction) == (trained_run.model_id, 32, 1.0)
    assert description.unit_length
    assert description.compared_with == "32 test images of the run"
    assert description.largest_difference < 1e-4
    assert Recipe().changed(description.recipe) == trained_run.recipe


@pytest.fixture
def traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX and torch.export share the trace of one network, the slowest part of an export."""
    trace, programs = write._trace, []

    def cached(model: torch.nn.Module, example: torch.Tensor) -> torch.export.ExportedProgram:
        if not programs:
            programs.append(trace(model, example))
        return programs[0]

    monkeypatch.setattr(write, "_trace", cached)


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_backbone_is_exported(backbone: str, tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", backbone=backbone, pooling="average+max")
    for format in FORMATS:
        if format != "safetensors" and backbone in SAME_CODE:
            continue
        path, description = export_run(run, tmp_path, format)
        assert max(differences(run, path, format)) < 1e-4, format
        assert description.compared_with.startswith("32 images of noise")


@pytest.mark.usefixtures("traced_once")
def test_three_heads_are_exported(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", backbone="googlenet", loss="hdc")
    for format in FORMATS:
        path, description = export_run(run, tmp_path, format)
        assert max(differences(run, path, format)) < 1e-4, format
        assert not description.unit_length  # the third head counts double


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_hub_models_are_exported(model_type: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    tiny_hub_model(transformers, model_type).save_pretrained(tmp_path / "hub")
    run = untrained(tmp_path / "run", backbone=f"hf:{tmp_path / 'hub'}")
    for format in FORMATS:
        path, _ = export_run(run, tmp_path, format)
        assert max(differences(run, path, format)) < 1e-4, format


def test_long_embeddings_are_compared_at_unit_length() -> None:
    images = torch.zeros(2, 1)
    model = torch.nn.Module()
    model.forward = lambda batch: torch.full((len(batch), 1), 1000.0)
    assert write.largest_difference(lambda batch: torch.full((len(batch), 1), 1001.0), model, images) == pytest.approx(
        1e-3
    )
    model.forward = lambda batch: torch.full((len(batch), 1), 0.1)
    assert write.largest_difference(lambda batch: torch.full((len(batch), 1), 0.3), model, images) == pytest.approx(0.2)


def test_json_describes_input_and_output(exported_files: Path) -> None:
    description = json.loads((exported_files / "model.onnx.json").read_text())
    assert description["input_shape"] == ["batch", 3, 32, 32]
    assert description["output_shape"] == ["batch", 128]
    for name in (
        "input",
        "input_type",
        "colors",
        "input_values",
        "crop_fraction",
        "preparation",
        "unit_length",
        "model",
    ):
        assert description[name]
    import onnxruntime

    session = onnxruntime.InferenceSession(exported_files / "model.onnx")
    for side, ends in (("input", session.get_inputs()), ("output", session.get_outputs())):
        (end,) = ends
        assert (end.name, end.shape) == (description[side], description[f"{side}_shape"])


class TestEmbedding:
    @pytest.mark.parametrize(("split", "count"), [(["--split", "train"], 9), ([], 18)], ids=["a half", "all"])
    def test_without_torch_equals_run(
        self, trained_run: Run, exported_files: Path, tmp_path: Path, split: list[str], count: int
    ) -> None:
        data = photos(tmp_path / "photos")
        options = ["--dataset", "folder", "--data", str(data), *split, "--out", str(tmp_path / "run.npz")]
        main(["embed", str(trained_run.folder), *options])
        arguments = ["embed", "--model", exported_files / "model.onnx", "--data", data, *split]
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", NO_TORCH, *arguments, "--out", tmp_path / "onnx.npz"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        ours, theirs = (Embeddings.load(tmp_path / name) for name in ("onnx.npz", "run.npz"))
        assert len(ours.vectors) == len(set(ours.paths)) == count
        for path, label in zip(ours.paths, ours.labels, strict=True):
            assert ours.class_name(label) == Path(path).parent.name
        np.testing.assert_allclose(ours.vectors, theirs.vectors, atol=1e-4)
        for field in ("labels", "paths", "class_names", "model"):
            assert np.array_equal(getattr(ours, field), getattr(theirs, field)), field

    def test_defaults_to_the_images_of_the_run(self, trained_run: Run, exported_files: Path, tmp_path: Path) -> None:
        main(["embed", str(trained_run.folder), "--out", str(tmp_path / "run.npz")])
        main(["embed", "--model", str(exported_files / "model.onnx"), "--out", str(tmp_path / "onnx.npz")])
        ours, theirs = (Embeddings.load(tmp_path / name) for name in ("onnx.npz", "run.npz"))
        np.testing.assert_allclose(ours.vectors, theirs.vectors, atol=1e-4)
        assert ours.paths.tolist() == theirs.paths.tolist()

    def test_skip_broken_counts_images(
        self, trained_run: Run, exported_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture
    ) -> None:
        broken = photos(tmp_path / "photos", broken=True)
        data = ["--dataset", "folder", "--data", broken, "--split", "test", "--out", tmp_path / "a.npz"]
        for made_by in (["--model", exported_files / "model.onnx"], [trained_run.folder]):
            code, line = failure(capsys, "embed", *made_by, *data)
            assert code == 1
            assert "3 of 12 images cannot be read, first class" in line
            assert line.endswith("leave them out with --skip-broken")
            assert not (tmp_path / "a.npz").exists()
            main([str(each) for each in ["embed", *made_by, *data, "--skip-broken"]])
            assert "skipped: 3 images that cannot be read" in capsys.readouterr().err
            assert len(Embeddings.load(tmp_path / "a.npz").vectors) == 9
            (tmp_path / "a.npz").unlink()

    def test_requires_a_run_or_a_model(
        self, trained_run: Run, exported_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture
    ) -> None:
        neither, both = [], [trained_run.folder, "--model", exported_files / "model.onnx"]
        for arguments, got in ((neither, "neither"), (both, "both")):
            code, line = failure(capsys, "embed", *arguments, "--out", tmp_path / "a.npz")
            assert code == 1
            assert line == f"error: expected the folder of a run or --model model.onnx, got {got}"


class TestErrors:
    """Each is one line on stderr and leaves no file behind."""

    @pytest.fixture
    def copy(self, exported_files: Path, tmp_path: Path) -> Path:
        for file in exported_files.glob("model.*"):
            (tmp_path / file.name).write_bytes(file.read_bytes())
        return tmp_path / "model.onnx"

    def embedding(self, capsys: pytest.CaptureFixture, path: Path) -> str:
        code, line = failure(capsys, "embed", "--model", path, "--out", path.parent / "a.npz")
        assert code == 1
        assert len(line.splitlines()) == 1
        assert not (path.parent / "a.npz").exists()
        return line

    def test_missing_file(self, copy: Path, capsys: pytest.CaptureFixture) -> None:
        (copy.parent / "model.onnx.json").unlink()
        assert f"no {copy}.json: expected model.onnx and model.onnx.json of proxygml export" in self.embedding(
            capsys, copy
        )
        copy.unlink()
        assert f"no {copy}: expected model.onnx and model.onnx.json of proxygml export" in self.embedding(capsys, copy)

    @pytest.mark.parametrize("suffix", [".onnx", ".safetensors"])
    def test_truncated_or_altered_file(self, copy: Path, suffix: str, capsys: pytest.CaptureFixture) -> None:
        path = copy.with_suffix(suffix)
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        for content in (whole[:-1], b"", bytes(flipped), whole + b"\0"):
            path.write_bytes(content)
            words = f"model{suffix} is truncated, altered or not described by model{suffix}.json"
            if suffix == ".onnx":
                assert words in self.embedding(capsys, path)
            else:
                with pytest.raises(ValueError, match=words):
                    load_network(path)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (
                {"version": VERSION + 1, "proxygml": "9.9"},
                f"expected version {VERSION}, got {VERSION + 1} (written by proxygml 9.9",
            ),
            ({"version": "1"}, "expected version as int, got '1'"),
            ({"image_size": None}, "expected image_size as int, got None"),
            ({"image_size": True}, "expected image_size as int, got True"),
            ({"image_size": 0}, "expected image_size of at least 1"),
            ({"crop_fraction": 1.5}, "crop_fraction above 0 and at most 1, got 32 and 1.5"),
            ({"recipe": []}, "expected recipe as dict"),
            (
                {"recipe": {"epoch": 3}},
                "'epoch': did you mean 'epochs'? (written by proxygml ",
            ),
            ({"sha256": ...}, "sha256 is missing"),
        ],
    )
    def test_invalid_description(self, copy: Path, change: dict, words: str, capsys: pytest.CaptureFixture) -> None:
        json_file = copy.parent / "model.onnx.json"
        values = json.loads(json_file.read_text()) | change
        json_file.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
        line = self.embedding(capsys, copy)
        assert line.startswith(f"error: {json_file} does not describe an exported network: ")
        assert words in line

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"3"])
    def test_description_without_json_object(self, copy: Path, content: bytes, capsys: pytest.CaptureFixture) -> None:
        (copy.parent / "model.onnx.json").write_bytes(content)
        assert "does not describe an exported network" in self.embedding(capsys, copy)

    def test_description_with_other_image_size(self, copy: Path, capsys: pytest.CaptureFixture) -> None:
        json_file = copy.parent / "model.onnx.json"
        json_file.write_text(json.dumps(json.loads(json_file.read_text()) | {"image_size": 40}))
        assert "takes images of 32 pixels, its JSON says 40" in self.embedding(capsys, copy)

    def test_other_formats_are_rejected(self, copy: Path, capsys: pytest.CaptureFixture) -> None:
        for format in ("safetensors", "torch-export"):
            line = self.embedding(capsys, copy.with_suffix(FORMATS[format].suffix))
            assert "expected a network exported as onnx" in line
            assert line.endswith(f"which is {format}")
        with pytest.raises(ValueError, match=r"expected a network exported as safetensors, got .*, which is onnx"):
            load_network(copy)

    def test_invalid_onnx_file(self, copy: Path, capsys: pytest.CaptureFixture) -> None:
        copy.write_bytes(b"no network")
        update_hash(copy)
        line = self.embedding(capsys, copy)
        assert "onnxruntime" in line
        assert f"cannot open {copy}" in line

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda tensors: tensors.pop("head.bias"), "it lacks tensors head.bias"),
            (lambda tensors: tensors.update(extra=torch.ones(1)), "it has the additional tensors extra"),
            (lambda tensors: tensors.update({"head.bias": torch.ones(3)}), r"expected the shapes head.bias \(128,\)"),
        ],
    )
    def test_weights_that_do_not_fit(self, copy: Path, change, words: str) -> None:
        from safetensors.torch import load_file, save_file

        path = copy.with_suffix(".safetensors")
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        update_hash(path)
        with pytest.raises(ValueError, match=words) as caught:
            load_network(path)
        assert len(str(caught.value).splitlines()) == 1

    def test_different_network_is_not_saved(
        self, trained_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        def write_different(model: torch.nn.Module, path: Path, example: torch.Tensor) -> None:
            model.head.bias.data += 1
            write._write_safetensors(model, path, example)
            model.head.bias.data -= 1

        wrong = FORMATS["safetensors"]._replace(write=write_different)
        monkeypatch.setitem(FORMATS, "safetensors", wrong)
        (tmp_path / "model.safetensors").write_text("previous file")
        code, line = failure(capsys, "export", trained_run.folder, "--format", "safetensors", "--out", tmp_path)
        assert code == 1
        assert "exported as safetensors differs from PyTorch by" in line
        assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [
            ("model.safetensors", "previous file")
        ]

    def test_nan_network_is_not_saved(self, trained_run: Run, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(write, "largest_difference", lambda *_: float("nan"))
        with pytest.raises(ValueError, match="differs from PyTorch by nan"):
            export_run(trained_run, tmp_path, "safetensors")
        assert not list(tmp_path.iterdir())

    def test_failing_exporter_is_one_line(self, trained_run: Run, tmp_path: Path, monkeypatch) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("\x1b[96madvice to developers") from KeyError("no such operator\nand pages of more")

        monkeypatch.setitem(FORMATS, "onnx", FORMATS["onnx"]._replace(write=fail))
        with pytest.raises(ValueError, match=r"^convnet cannot be exported as onnx: 'no such operator"):
            export_run(trained_run, tmp_path, "onnx")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("out", "words"),
        [
            ("model.pt2", "expected a folder or a .onnx file for the format onnx, got model.pt2"),
            ("taken", "expected a folder or a .onnx file for the format onnx, got taken"),
        ],
    )
    def test_output_does_not_fit_format(
        self, trained_run: Run, tmp_path: Path, out: str, words: str, monkeypatch, capsys: pytest.CaptureFixture
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("taken").write_text("something")
        code, line = failure(capsys, "export", trained_run.folder, "--out", out)
        assert code == 1
        assert words in line
        assert [path.name for path in tmp_path.iterdir()] == ["taken"]

    def test_run_without_weights(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        Run.create(tmp_path / "run", Recipe())
        code, line = failure(capsys, "export", tmp_path / "run", "--out", tmp_path / "out")
        assert code == 1
        assert "no best.pt" in line
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("library", ["onnxscript", "onnxruntime"])
    def test_missing_library(
        self, trained_run: Run, tmp_path: Path, library: str, monkeypatch, capsys: pytest.CaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, library, None)
        code, line = failure(capsys, "export", trained_run.folder, "--out", tmp_path / "out")
        assert code == 1
        assert line == f'error: export as onnx needs {library}: pip install "proxygml[export]"'
        assert not (tmp_path / "out").exists()


def update_hash(path: Path) -> None:
    """Make the description fit a file that was changed on purpose."""
    from proxygml.export.runtime import description_path, file_hash

    json_file = description_path(path)
    description = Description.from_json(json_file.read_text())
    json_file.write_text(replace(description, sha256=file_hash(path)).to_json())
