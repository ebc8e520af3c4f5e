"""Networks exported: equal to PyTorch, described, run without torch, and refused where anything is wrong."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxygml import export, ingredients, training
from proxygml.backbones import BACKBONES
from proxygml.cli import main
from proxygml.embeddings import Embeddings
from proxygml.export import FORMATS, export_run, load_network
from proxygml.exported import VERSION, Description, read_description
from proxygml.recipes import Recipe
from proxygml.runs import Run

from .backbones.test_hub import KINDS
from .backbones.test_hub import tiny as tiny_hub_model
from .test_cli import failure

pytest.importorskip("onnxscript", reason='onnxscript is not installed: pip install "proxygml[export]"')
pytest.importorskip("onnxruntime", reason='onnxruntime is not installed: pip install "proxygml[export]"')

SAME_CODE = {"resnet50", "efficientnet-lite1", "efficientnet-lite2"}  # as the smaller ones, with more of the same
NO_TORCH = """
import sys

class Missing:
    names = "torch lightning_fabric safetensors faiss sklearn scipy matplotlib onnx onnxscript".split()

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
from proxygml.cli import main
main()
"""


def untrained(folder: Path, **settings: object) -> Run:
    """A run whose network is as it was built, for images that are not there."""
    recipe = Recipe(**{"dataset": "folder", "data": "nowhere", "image_size": 64, "embedding_dim": 12} | settings)
    torch.manual_seed(0)
    run = Run.create(folder, recipe)
    run.save_best({"model": ingredients.build_model(recipe).state_dict()})
    return run


@torch.no_grad()
def differences(run: Run, path: Path, format: str) -> list[float]:
    """How far the embeddings of a batch of 5 and of 1 are from the run's, by the formats' own readers."""
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
    expected = training.load_model(run)(images)
    return [(network(images[:count]) - expected[:count]).abs().max().item() for count in (5, 1)]


def photos(folder: Path, *, broken: bool = False) -> Path:
    """Six classes of three photos that differ, as JPEG, PNG with transparency, and on its side."""
    random = np.random.default_rng(0)
    for number in range(6):
        inside = folder / f"class{number}"
        inside.mkdir(parents=True)
        images = [Image.fromarray(random.integers(0, 256, (50, 70, 4), dtype=np.uint8)) for _ in range(3)]
        images[0].convert("RGB").resize((700, 500)).save(inside / "large.jpg")
        images[1].save(inside / "transparent.png")
        exif = Image.Exif()
        exif[0x0112] = 6
        images[2].convert("RGB").save(inside / "turned.jpg", exif=exif)
        if broken:
            (inside / "cut.png").write_bytes((inside / "transparent.png").read_bytes()[:80])
    return folder


@pytest.mark.parametrize("format", FORMATS)
def test_an_exported_network_gives_the_embeddings_of_its_run(
    exported_files: Path, trained_run: Run, format: str
) -> None:
    path = exported_files / f"model{FORMATS[format].suffix}"
    assert max(differences(trained_run, path, format)) < 1e-4
    said = read_description(path, format)
    assert (said.model, said.image_size, said.crop_share) == (trained_run.mark, 32, 1.0)
    assert said.unit_length
    assert said.compared_with == "32 test images of the run"
    assert said.largest_difference < 1e-4
    assert Recipe().changed(said.recipe) == trained_run.recipe


@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_backbone_can_be_exported(backbone: str, tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", backbone=backbone, pooling="average+max")
    for format in FORMATS:
        if format != "safetensors" and backbone in SAME_CODE:
            continue
        path, said = export_run(run, tmp_path, format)
        assert max(differences(run, path, format)) < 1e-4, format
        assert said.compared_with.startswith("32 images of noise")


def test_a_network_of_three_heads_can_be_exported(tmp_path: Path) -> None:
    run = untrained(tmp_path / "run", backbone="googlenet", loss="hdc")
    for format in FORMATS:
        path, said = export_run(run, tmp_path, format)
        assert max(differences(run, path, format)) < 1e-4, format
        assert not said.unit_length  # the third head counts double


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_of_the_hub_can_be_exported(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    tiny_hub_model(transformers, kind).save_pretrained(tmp_path / "hub")
    run = untrained(tmp_path / "run", backbone=f"hf:{tmp_path / 'hub'}")
    for format in FORMATS:
        path, _ = export_run(run, tmp_path, format)
        assert max(differences(run, path, format)) < 1e-4, format


def test_long_embeddings_are_compared_as_if_of_length_one() -> None:
    images = torch.zeros(2, 1)
    model = torch.nn.Module()
    model.forward = lambda batch: torch.full((len(batch), 1), 1000.0)
    assert export.largest_difference(lambda batch: torch.full((len(batch), 1), 1001.0), model, images) == pytest.approx(
        1e-3
    )
    model.forward = lambda batch: torch.full((len(batch), 1), 0.1)
    assert export.largest_difference(lambda batch: torch.full((len(batch), 1), 0.3), model, images) == pytest.approx(
        0.2
    )


def test_the_json_says_all_that_a_stranger_needs(exported_files: Path) -> None:
    said = json.loads((exported_files / "model.onnx.json").read_text())
    assert said["input_shape"] == ["batch", 3, 32, 32]
    assert said["output_shape"] == ["batch", 128]
    for name in ("input", "input_type", "colours", "input_values", "crop_share", "preparation", "unit_length", "model"):
        assert said[name]
    import onnxruntime

    session = onnxruntime.InferenceSession(exported_files / "model.onnx")
    for side, ends in (("input", session.get_inputs()), ("output", session.get_outputs())):
        (end,) = ends
        assert (end.name, end.shape) == (said[side], said[f"{side}_shape"])


class TestEmbedding:
    @pytest.mark.parametrize(("split", "count"), [(["--split", "train"], 9), ([], 18)], ids=["a half", "all"])
    def test_without_torch_gives_the_same_file_as_the_run(
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

    def test_takes_the_images_of_the_run_where_none_are_named(
        self, trained_run: Run, exported_files: Path, tmp_path: Path
    ) -> None:
        main(["embed", str(trained_run.folder), "--out", str(tmp_path / "run.npz")])
        main(["embed", "--model", str(exported_files / "model.onnx"), "--out", str(tmp_path / "onnx.npz")])
        ours, theirs = (Embeddings.load(tmp_path / name) for name in ("onnx.npz", "run.npz"))
        np.testing.assert_allclose(ours.vectors, theirs.vectors, atol=1e-4)
        assert ours.paths.tolist() == theirs.paths.tolist()

    def test_skips_and_counts_broken_images_only_when_told(
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

    def test_needs_a_run_or_a_model(
        self, trained_run: Run, exported_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture
    ) -> None:
        neither, both = [], [trained_run.folder, "--model", exported_files / "model.onnx"]
        for given, got in ((neither, "neither"), (both, "both")):
            code, line = failure(capsys, "embed", *given, "--out", tmp_path / "a.npz")
            assert code == 1
            assert line == f"error: expected the folder of a run or --model model.onnx, got {got}"


class TestMistakes:
    """Each is one line on stderr that says what to do; nothing is left behind."""

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

    def test_a_file_that_is_not_there(self, copy: Path, capsys: pytest.CaptureFixture) -> None:
        (copy.parent / "model.onnx.json").unlink()
        assert f"no {copy}.json: expected what proxygml export wrote" in self.embedding(capsys, copy)
        copy.unlink()
        assert f"no {copy}: expected what proxygml export wrote" in self.embedding(capsys, copy)

    @pytest.mark.parametrize("suffix", [".onnx", ".safetensors"])
    def test_a_file_that_is_cut_short_or_altered(self, copy: Path, suffix: str, capsys: pytest.CaptureFixture) -> None:
        path = copy.with_suffix(suffix)
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        for content in (whole[:-1], b"", bytes(flipped), whole + b"\0"):
            path.write_bytes(content)
            words = f"model{suffix} is cut short, altered or not the file that model{suffix}.json describes"
            if suffix == ".onnx":
                assert words in self.embedding(capsys, path)
            else:
                with pytest.raises(ValueError, match=words):
                    load_network(path)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"version": VERSION + 1, "proxygml": "9.9"}, f"of version {VERSION + 1}, written by proxygml 9.9"),
            ({"version": "1"}, "expected version as int, got '1'"),
            ({"image_size": None}, "expected image_size as int, got None"),
            ({"image_size": True}, "expected image_size as int, got True"),
            ({"image_size": 0}, "expected image_size of at least 1"),
            ({"crop_share": 1.5}, "crop_share above 0 and at most 1, got 32 and 1.5"),
            ({"recipe": []}, "expected recipe as dict"),
            (
                {"recipe": {"epoch": 3}},
                "'epoch': did you mean 'epochs'? (written by proxygml ",
            ),
            ({"sha256": ...}, "it does not say sha256"),
        ],
    )
    def test_a_description_that_is_wrong(
        self, copy: Path, change: dict, words: str, capsys: pytest.CaptureFixture
    ) -> None:
        beside = copy.parent / "model.onnx.json"
        values = json.loads(beside.read_text()) | change
        beside.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
        line = self.embedding(capsys, copy)
        assert line.startswith(f"error: {beside} does not describe an exported network: ")
        assert words in line

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"3"])
    def test_a_description_that_is_no_json_object(
        self, copy: Path, content: bytes, capsys: pytest.CaptureFixture
    ) -> None:
        (copy.parent / "model.onnx.json").write_bytes(content)
        assert "does not describe an exported network" in self.embedding(capsys, copy)

    def test_a_description_of_other_images(self, copy: Path, capsys: pytest.CaptureFixture) -> None:
        beside = copy.parent / "model.onnx.json"
        beside.write_text(json.dumps(json.loads(beside.read_text()) | {"image_size": 40}))
        assert "takes images of 32 pixels, and its JSON says 40" in self.embedding(capsys, copy)

    def test_another_format_than_onnx(self, copy: Path, capsys: pytest.CaptureFixture) -> None:
        for format in ("safetensors", "torch-export"):
            line = self.embedding(capsys, copy.with_suffix(FORMATS[format].suffix))
            assert "expected a network exported as onnx" in line
            assert line.endswith(f"which is {format}")
        with pytest.raises(ValueError, match=r"expected a network exported as safetensors, got .*, which is onnx"):
            load_network(copy)

    def test_an_onnx_file_that_onnxruntime_does_not_take(self, copy: Path, capsys: pytest.CaptureFixture) -> None:
        copy.write_bytes(b"no network")
        described(copy)
        line = self.embedding(capsys, copy)
        assert "onnxruntime" in line
        assert f"cannot open {copy}" in line

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda tensors: tensors.pop("head.bias"), "it lacks 1 tensors, first head.bias"),
            (lambda tensors: tensors.update(extra=torch.ones(1)), "it has beside those of the network 1 tensors"),
            (lambda tensors: tensors.update({"head.bias": torch.ones(3)}), r"expected the shapes head.bias \(128,\)"),
        ],
    )
    def test_weights_that_do_not_fit_the_recipe(self, copy: Path, change, words: str) -> None:
        from safetensors.torch import load_file, save_file

        path = copy.with_suffix(".safetensors")
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)
        described(path)
        with pytest.raises(ValueError, match=words) as caught:
            load_network(path)
        assert len(str(caught.value).splitlines()) == 1

    def test_a_network_that_differs_is_not_kept(
        self, trained_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        def write_another(model: torch.nn.Module, path: Path, example: torch.Tensor) -> None:
            model.head.bias.data += 1
            export._write_safetensors(model, path, example)
            model.head.bias.data -= 1

        wrong = FORMATS["safetensors"]._replace(write=write_another)
        monkeypatch.setitem(FORMATS, "safetensors", wrong)
        (tmp_path / "model.safetensors").write_text("of before")
        code, line = failure(capsys, "export", trained_run.folder, "--format", "safetensors", "--out", tmp_path)
        assert code == 1
        assert "exported as safetensors differs from PyTorch by" in line
        assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("model.safetensors", "of before")]

    def test_a_network_that_becomes_nan_is_not_kept(self, trained_run: Run, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(export, "largest_difference", lambda *_: float("nan"))
        with pytest.raises(ValueError, match="differs from PyTorch by nan"):
            export_run(trained_run, tmp_path, "safetensors")
        assert not list(tmp_path.iterdir())

    def test_an_exporter_that_fails_is_one_line(self, trained_run: Run, tmp_path: Path, monkeypatch) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("\x1b[96madvice to developers") from KeyError("no such operator\nand pages of more")

        monkeypatch.setitem(FORMATS, "onnx", FORMATS["onnx"]._replace(write=fail))
        with pytest.raises(ValueError, match=r"^convnet cannot be exported as onnx: 'no such operator"):
            export_run(trained_run, tmp_path, "onnx")
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("out", "words"),
        [
            ("model.pt2", "expected a folder or a file that ends in .onnx for the format onnx, got model.pt2"),
            ("taken", "got taken, which is another file"),
        ],
    )
    def test_a_name_that_does_not_fit_the_format(
        self, trained_run: Run, tmp_path: Path, out: str, words: str, monkeypatch, capsys: pytest.CaptureFixture
    ) -> None:
        monkeypatch.chdir(tmp_path)
        Path("taken").write_text("something")
        code, line = failure(capsys, "export", trained_run.folder, "--out", out)
        assert code == 1
        assert words in line
        assert [path.name for path in tmp_path.iterdir()] == ["taken"]

    def test_a_run_without_weights(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        Run.create(tmp_path / "run", Recipe())
        code, line = failure(capsys, "export", tmp_path / "run", "--out", tmp_path / "out")
        assert code == 1
        assert "no best.pt" in line
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("library", ["onnxscript", "onnxruntime"])
    def test_a_library_that_is_missing(
        self, trained_run: Run, tmp_path: Path, library: str, monkeypatch, capsys: pytest.CaptureFixture
    ) -> None:
        monkeypatch.setitem(sys.modules, library, None)
        code, line = failure(capsys, "export", trained_run.folder, "--out", tmp_path / "out")
        assert code == 1
        assert line == f'error: export as onnx needs {library}: pip install "proxygml[export]"'
        assert not (tmp_path / "out").exists()


def described(path: Path) -> None:
    """Makes the description beside a file that was changed on purpose fit it again."""
    from proxygml.exported import description_path, file_hash

    beside = description_path(path)
    said = Description.from_json(beside.read_text())
    beside.write_text(replace(said, sha256=file_hash(path)).to_json())
