"""Embeddings: the .npz and the functions that compute them."""

import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxygml import embeddings
from proxygml.data.images import Crops
from proxygml.embeddings import Embeddings, embed, raw_pixels
from proxygml.retrieval import Index


def example(count: int = 5) -> Embeddings:
    rng = np.random.default_rng(0)
    return Embeddings(
        rng.normal(size=(count, 3)).astype(np.float32),
        np.arange(count) % 2,
        np.array([f"röd/{number}.jpg" for number in range(count)]),
        np.array(["röd", "blå"]),
        "model id",
    )


def test_save_and_load(tmp_path: Path) -> None:
    example().save(tmp_path / "a.npz")
    loaded = Embeddings.load(tmp_path / "a.npz")
    np.testing.assert_array_equal(loaded.vectors, example().vectors)
    np.testing.assert_array_equal(loaded.labels, example().labels)
    assert loaded.paths.tolist() == example().paths.tolist()
    assert loaded.class_names.tolist() == ["röd", "blå"]
    assert loaded.class_name(1) == "blå"
    assert loaded.model == "model id"


def test_save_removes_leftovers_of_killed_writers(tmp_path: Path) -> None:
    (tmp_path / ".vectors-abcdefgh.npz").touch()
    Embeddings(np.eye(2), np.arange(2), np.array(["a", "b"])).save(tmp_path / "vectors.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["vectors.npz"]


def test_missing_paths_are_numbers(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", vectors=np.ones((3, 2), np.float16), labels=np.array([0, 1, 1]))
    loaded = Embeddings.load(tmp_path / "own.npz")
    assert loaded.paths.tolist() == ["0", "1", "2"]
    assert (loaded.class_name(1), loaded.model) == ("1", "")


def test_labels_may_be_missing(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", vectors=np.eye(3), paths=np.array(["a", "b", "c"]))
    loaded = Embeddings.load(tmp_path / "own.npz")
    assert (loaded.labels.tolist(), loaded.unlabeled, loaded.class_name(-1)) == ([-1] * 3, 3, "")
    loaded.save(tmp_path / "again.npz")
    assert not {"labels", "class_names"} & set(np.load(tmp_path / "again.npz"))
    assert Embeddings.load(tmp_path / "again.npz").labels.tolist() == [-1] * 3


def test_empty_class_name_is_no_label(tmp_path: Path) -> None:
    some = Embeddings(np.eye(3), np.array([2, 0, 1]), np.array(["a", "b", "c"]), np.array(["wren", "", "crow"]))
    assert some.labels.tolist() == [2, 0, -1]
    index = Index.from_embeddings(some)
    (block,) = index.blocks()
    for each in (some, block, embeddings.concatenate([some, block])):
        named = [each.class_name(label) for label in each.labels]
        assert named[:3] == ["crow", "wren", ""]
        assert each.unlabeled == named.count("")
    some.save(tmp_path / "some.npz")
    assert Embeddings.load(tmp_path / "some.npz").labels.tolist() == [2, 0, -1]


def test_labels_may_be_class_names(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", vectors=np.ones((3, 2)), labels=np.array(["wren", "crow", "wren"]))
    loaded = Embeddings.load(tmp_path / "own.npz")
    assert [loaded.class_name(label) for label in loaded.labels] == ["wren", "crow", "wren"]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"labels": np.arange(3)}, "no array vectors, only labels"),
        ({"vectors": np.eye(3), "class_names": np.array(["a"])}, "no array labels, only vectors, class_names"),
        ({"vectors": np.ones(3), "labels": np.arange(3)}, r"expected vectors as floats \(M, D\)"),
        ({"vectors": np.ones((3, 2)), "labels": np.arange(4)}, "3 vectors, 4 labels"),
        ({"vectors": np.ones((3, 2)), "labels": np.ones(3)}, "expected integer labels .*, got float64"),
        ({"vectors": np.ones((3, 2)), "labels": np.array(1)}, r"expected integer labels \(M,\), got int64 \(\)"),
        (
            {"vectors": np.ones((2, 2)), "labels": np.array([0, 3]), "class_names": np.array(["a", "b"])},
            r"expected labels below 2 \(class_names\), got 3",
        ),
        (
            {"vectors": np.eye(2), "labels": np.array(["a", "b"], object)},
            r"Python objects.*: save labels.astype\(str\)",
        ),
    ],
)
def test_invalid_npz_raises(tmp_path: Path, arrays: dict, message: str) -> None:
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=message) as caught:
        Embeddings.load(tmp_path / "bad.npz")
    assert "bad.npz does not contain embeddings" in str(caught.value)


def test_damaged_file_raises(tmp_path: Path) -> None:
    example(500).save(tmp_path / "a.npz")
    whole = (tmp_path / "a.npz").read_bytes()
    np.save(tmp_path / "array.npy", np.ones(3))
    array = (tmp_path / "array.npy").read_bytes()
    for content in [whole[: len(whole) // 2], whole[:-1], b"", b"not a zip", b"PK\x03\x04", array]:
        (tmp_path / "cut.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"cut.npz does not contain embeddings"):
            Embeddings.load(tmp_path / "cut.npz")
    with pytest.raises(FileNotFoundError, match=r"absent.npz does not exist: expected a file"):
        Embeddings.load(tmp_path / "absent.npz")


def test_text_named_npz_is_refused_without_advice_to_unpickle(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("hello\n")
    with pytest.raises(
        ValueError, match=r"text.npz does not contain embeddings: expected an .npz as numpy.savez writes"
    ):
        Embeddings.load(tmp_path / "text.npz")


def test_embed_keeps_order_and_training_mode() -> None:
    shades = [Image.new("RGB", (8, 8), (shade,) * 3) for shade in range(0, 250, 10)]
    crops = Crops(lambda index: shades[index], np.arange(len(shades)), size=8)

    class Brightness(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            assert not self.training
            assert not torch.is_grad_enabled()
            return images.float().mean(dim=(2, 3))

    model, calls = Brightness().train(), []
    result = embed(
        model, crops, np.arange(len(shades)).astype(str), batch_size=4, progress=lambda *at: calls.append(at)
    )
    np.testing.assert_array_equal(result.vectors[:, 0], np.arange(0, 250, 10))
    assert model.training
    assert calls[0] == (4, 25)
    assert calls[-1] == (25, 25)


def test_raw_pixels_ignore_brightness() -> None:
    dark = np.random.default_rng(0).integers(0, 100, (32, 32), dtype=np.uint8)
    images = [Image.fromarray(dark), Image.fromarray(dark + 100), Image.new("L", (32, 32), 7)]
    vectors = raw_pixels(Crops(lambda index: images[index], np.arange(3), size=64, test_crop=1.0))
    assert vectors.shape == (3, 1024)
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), [1, 1, 0], atol=1e-6)


@pytest.mark.slow
def test_flipped_bit_is_detected_or_harmless(tmp_path: Path) -> None:
    """A sample of the bits, denser in the zip directory at the end of the file."""
    whole = Embeddings(np.eye(4), np.arange(4), np.array(["a", "b", "c", "d"]), np.array(list("wxyz")), "id")
    path = tmp_path / "a.npz"
    whole.save(path)
    content = path.read_bytes()
    directory, detected = content.index(b"PK\x01\x02"), []
    positions = [*range(8 * directory, 8 * len(content), 3), *range(0, 8 * directory, 29)]
    for position in positions:
        altered = bytearray(content)
        altered[position // 8] ^= 1 << position % 8
        path.write_bytes(altered)
        try:
            loaded = Embeddings.load(path)
        except ValueError as error:
            detected.append(str(error))
            continue
        for name, expected in vars(whole).items():
            np.testing.assert_array_equal(getattr(loaded, name), expected)
    assert len(detected) > len(positions) / 3
    assert all(line.startswith(f"{path} does not contain embeddings: ") for line in detected)


def test_compressed_npz_takes_bounded_memory(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", vectors=np.zeros((10**7, 2), np.float16), labels=np.zeros(10**7, np.int8))
    with pytest.raises(ValueError, match=r"unpacks to 50,000,.*: it is not opened"):
        Embeddings.load(tmp_path / "a.npz")
    np.savez_compressed(tmp_path / "b.npz", vectors=np.zeros((10**5, 1), np.float16), labels=np.zeros(10**5, np.int8))
    assert Embeddings.load(tmp_path / "b.npz").paths.dtype == "U6"  # 24 bytes for each row, not 84


def test_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npz")
    for path, what in ((tmp_path / "a.npz", "a pipe or device"), (Path("/dev/zero"), "a pipe"), (tmp_path, "a folder")):
        with pytest.raises(ValueError, match=f"{path} is {what}.*: expected a file"):
            Embeddings.load(path)


def test_workers_do_not_exceed_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def load_batches(loader: torch.utils.data.DataLoader) -> list:
        started.append(loader.num_workers)
        return [(torch.zeros(1, 2), None)]

    monkeypatch.setattr(embeddings, "load_batches", load_batches)
    crops = Crops(lambda _: Image.new("RGB", (8, 8)), np.zeros(1, int), size=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch's, of too many workers
        embed(torch.nn.Identity(), crops, np.array(["a"]), workers=150)
    assert started == [os.cpu_count()]
