"""Images in tar files: listed and read without unpacking, streamed without loss or repetition."""

import io
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from proxygml import data
from proxygml.data import sampling, tar
from proxygml.data.check import find_problems
from proxygml.training import build
from proxygml.training.loop import TrainingLoop
from proxygml.training.presets import GLYPHS
from proxygml.training.start import train


def add(archive: tarfile.TarFile, name: str, contents: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(contents)
    archive.addfile(member, io.BytesIO(contents))


def picture(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), (shade, 255 - shade, 90)).save(file, format="png")
    return file.getvalue()


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Three files with images of eight classes, four each; the class as text or as JSON."""
    for number in range(3):
        with tarfile.open(tmp_path / f"part-{number}.tar", "w") as archive:
            for image in range(number, 32, 3):
                kind = f"kind {image % 8}"
                if image % 2:
                    add(archive, f"some/{image:03d}.json", f'{{"label": "{kind}", "more": 1}}'.encode())
                    add(archive, f"some/{image:03d}.png", picture(7 * image))
                else:
                    add(archive, f"{image:03d}.PNG", picture(7 * image))
                    add(archive, f"{image:03d}.cls", f"{kind}\n".encode())
                add(archive, f"{image:03d}.seg.txt" if not image % 2 else f"some/{image:03d}.txt", b"of no use here")
    return tmp_path


def test_images_and_classes(shards: Path) -> None:
    both = data.load("tar", shards)
    assert [len(images) for images in both] == [16, 16]
    names = [name for images in both for name in images.class_names]
    assert sorted(names) == [f"kind {number}" for number in range(8)]
    for images in both:
        for index, path in enumerate(images.paths):
            number = int(path.split("@")[0].split("/")[-1].split(".")[0])
            assert images.class_names[images.labels[index]] == f"kind {number % 8}"
            with images.open(index) as image:
                assert image.getpixel((0, 0)) == (7 * number, 255 - 7 * number, 90)
        assert find_problems(images) == []
    alone, _ = data.load("tar", shards / "part-0.tar", test_fraction=0.25)
    assert {path.split("/")[0] for path in alone.paths} == {"part-0.tar"}


@pytest.mark.slow
def test_training(shards: Path, tmp_path: Path) -> None:
    recipe = GLYPHS.changed(
        {"dataset": "tar", "data": str(shards), "image_size": 16, "held_out": 0.0, "epochs": 1, "ratio": 1.0}
        | {"baselines": False, "workers": 2, "batch_size": 5, "cache": str(tmp_path / "cache")}
    )
    run = train(recipe, tmp_path / "run")
    assert run.scores["trained"]["images"] == 16
    assert not (tmp_path / "cache").exists()  # as presets for photos ask for one


@pytest.mark.slow
def test_processes_and_workers_read_every_image_once(shards: Path) -> None:
    images, _ = data.load("tar", shards)
    recipe = GLYPHS.changed({"dataset": "tar", "data": str(shards), "image_size": 8, "batch_size": 5, "workers": 2})
    batches = build.draw_batches(recipe, images.labels, nn.Identity(), epoch=0)
    read: list[int] = []
    for rank in range(2):
        process = SimpleNamespace(global_rank=rank, world_size=2, device=torch.device("cpu"))
        loop = cast(TrainingLoop, SimpleNamespace(recipe=recipe, images=images, fabric=process, on_cuda=False))
        for pixels, _ in TrainingLoop._load(loop, batches, epoch=0):
            read += (pixels[:, 0, 0, 0] // 7).tolist()  # by their shade of red
    assert sorted(read) == sorted(int(re.search(r"(\d+)\.png@", path, re.I).group(1)) for path in images.paths)


@pytest.mark.parametrize(
    ("member", "contents", "message"),
    [
        ("lost.png", picture(1), "lost lacks a class"),
        ("lost.cls", b"kind 1", "lost lacks an image"),
        ("wrong.json", b'{"kind": 1}', "expected a class, as text or as"),
        ("empty.cls", b" \n", "expected a class, got nothing"),
        ("long.cls", b"a" * 70_000, "too many for a class"),
    ],
)
def test_bad_member(shards: Path, member: str, contents: bytes, message: str) -> None:
    with tarfile.open(shards / "part-3.tar", "w") as archive:
        add(archive, member, contents)
    with pytest.raises(ValueError, match=rf"part-3.tar: .*{message}"):
        data.load("tar", shards)


def test_truncated_and_missing_files(shards: Path, tmp_path: Path) -> None:
    images, _ = data.load("tar", shards)
    whole = (shards / "part-2.tar").read_bytes()
    (shards / "part-2.tar").write_bytes(whole[:700])
    problems = find_problems(images)
    assert problems
    assert all(problem.path.startswith("part-2.tar/") for problem in problems)
    with pytest.raises(ValueError, match="truncated or no tar file"):
        data.load("tar", shards)
    with pytest.raises(FileNotFoundError, match="no tar files in"):
        data.load("tar", tmp_path / "nothing")


@pytest.mark.parametrize("images", [1, 2, 33, 5000, 20_001])
def test_streamed_has_every_image_once(images: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "RUN", 100)
    monkeypatch.setattr(sampling, "WINDOW", 4)
    orders = [np.concatenate(sampling.streamed(images, 32, seed=1, epoch=epoch)) for epoch in (0, 1)]
    for order in orders:
        assert np.array_equal(np.sort(order), np.arange(images))
    assert images < 33 or not np.array_equal(*orders)
    again = np.concatenate(sampling.streamed(images, 32, seed=1, epoch=0))
    assert np.array_equal(orders[0], again)
    for start in range(0, images, 400):
        assert len(np.unique(orders[0][start : start + 400] // 100)) <= 8  # two windows at most
    parts = [np.array_split(batch, 3) for batch in sampling.streamed(images, 32, seed=1, epoch=0)]
    assert np.array_equal(np.sort(np.concatenate([rows for part in parts for rows in part])), np.arange(images))


def test_listing_is_cached(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = data.load("tar", shards)

    def never(file: Path) -> None:
        pytest.fail(f"{file} was listed again")

    monkeypatch.setattr(tar, "_samples", never)
    for before, after in zip(first, data.load("tar", shards), strict=True):
        assert list(after.paths) == list(before.paths)
        assert after.class_names == before.class_names
        np.testing.assert_array_equal(after.labels, before.labels)


def test_changed_file_is_listed_again(shards: Path) -> None:
    before = sum(map(len, data.load("tar", shards)))
    with tarfile.open(shards / "part-0.tar", "a") as archive:
        add(archive, "new.png", picture(1))
        add(archive, "new.cls", b"kind 9")
    both = data.load("tar", shards)
    assert sum(map(len, both)) == before + 1
    assert "kind 9" in [name for images in both for name in images.class_names]


@pytest.mark.parametrize("damage", [lambda kept: kept[:-20], lambda kept: b"", lambda kept: b"\xff" + kept[1:]])
def test_damaged_listing_is_replaced(shards: Path, own_cache: Path, damage: Callable[[bytes], bytes]) -> None:
    before = data.load("tar", shards)
    for kept in (own_cache / "tar").glob("*.json"):
        kept.write_bytes(damage(kept.read_bytes()))
    for one, other in zip(before, data.load("tar", shards), strict=True):
        assert list(one.paths) == list(other.paths)


def test_unwritable_cache(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("PROXYGML_CACHE", str(tmp_path / "a file"))
    assert [len(images) for images in data.load("tar", shards)] == [16, 16]


def test_file_and_folder_names(shards: Path, tmp_path: Path) -> None:
    folder = tmp_path / "all.tar"
    folder.mkdir()
    (shards / "part-0.tar").rename(folder / "part-0.tar")
    for images in data.load("tar", folder):
        assert find_problems(images) == []
    with pytest.raises(FileNotFoundError, match=r"expected file names that end in \.tar"):
        data.load("tar", (folder / "part-0.tar").rename(folder / "part-0.wds"))


def test_shards_leave_no_descriptors_open(tmp_path: Path) -> None:
    for number in range(70):
        with tarfile.open(tmp_path / f"{number:02d}.tar", "w") as archive:
            add(archive, "a.png", picture(number))
            add(archive, "a.cls", f"kind {number % 4}".encode())
    images, _ = data.load("tar", tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        assert find_problems(images) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_pipe_among_shards_is_refused(shards: Path) -> None:
    os.mkfifo(shards / "part-9.tar")
    with pytest.raises(ValueError, match=r"part-9\.tar is a pipe or device: expected a file"):
        data.load("tar", shards)
