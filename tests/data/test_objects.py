"""Images that are passed as objects: Datasets, arrays, paths, frames, by split."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxygml.data.objects import as_image_list, labeled_images, load_objects

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 5, 4, 3), np.uint8)
LABELS = np.array([9, 3, 9, 3, 40, 40])


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    names = [tmp_path / f"{number}.png" for number in range(6)]
    for name, pixels in zip(names, PIXELS, strict=True):
        Image.fromarray(pixels).save(name)
    return names


@pytest.mark.parametrize(
    "images",
    [
        PIXELS,
        list(PIXELS),
        [Image.fromarray(each) for each in PIXELS],
        torch.from_numpy(PIXELS).permute(0, 3, 1, 2),
        torch.from_numpy(PIXELS / 255).permute(0, 3, 1, 2),
        "paths",
    ],
    ids=["array", "list", "PIL", "bytes", "floats", "paths"],
)
def test_images_in_any_form(images: object, paths: list[Path]) -> None:
    images = paths if isinstance(images, str) else images
    dataset = [(image, int(label)) for image, label in zip(images, LABELS, strict=True)]
    for data in ((images, LABELS), dataset):
        listed = as_image_list(data)
        assert listed.class_names == ("3", "9", "40")  # in the order of the numbers, gaps and all
        assert listed.labels.tolist() == [1, 0, 1, 0, 2, 2]
        for row in range(6):
            assert np.array_equal(listed.open(row).convert("RGB"), PIXELS[row])
        assert np.array_equal(listed.select(np.array([4, 1])).open(1).convert("RGB"), PIXELS[1])


def test_targets_of_a_dataset_are_not_read_one_by_one() -> None:
    class Listed(torch.utils.data.TensorDataset):
        targets = torch.from_numpy(LABELS)
        read = 0

        def __getitem__(self, row: int) -> tuple:
            self.read += 1
            return super().__getitem__(row)

    dataset = Listed(torch.from_numpy(PIXELS), torch.from_numpy(LABELS))
    assert as_image_list(dataset).labels.tolist() == [1, 0, 1, 0, 2, 2]
    assert dataset.read == 1  # to see whether it is an image


def test_open_pil_images_stay_as_they_are(paths: list[Path]) -> None:
    with Image.open(paths[0]) as opened:
        listed = as_image_list(([opened], ["a"]))
        for _ in range(2):
            with listed.open(0) as image:
                image.thumbnail((2, 2))
        assert np.array_equal(opened, PIXELS[0])


def test_frame_by_split(paths: list[Path]) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"path": paths, "label": ["b", "a", "b", "a", "c", "c"]})
    assert as_image_list(frame).class_names == ("a", "b", "c")
    frame["split"] = ["train", "train", "query", "query", "gallery", "gallery"]
    with pytest.warns(UserWarning, match="2 of 2 query classes are not in the gallery, first a") as caught:
        train, test = load_objects(frame, test_fraction=0.5)
    assert caught[0].filename == __file__  # not a line of the package
    assert [Path(path).name for path in train.paths] == ["0.png", "1.png"]
    assert [Path(path).name for path in test.paths] == ["2.png", "3.png", "4.png", "5.png"]
    assert (test.queries.tolist(), test.class_names) == ([True, True, False, False], ("a", "b", "c"))
    with pytest.raises(ValueError, match=r"lacks label$"):
        as_image_list(frame[["path"]])
    with pytest.raises(ValueError, match="expected every path once"):
        as_image_list(pandas.concat([frame, frame]))
    with pytest.raises(
        ValueError, match=r"by split \(train, test, query, gallery\), got 'trian': did you mean 'train'\?$"
    ):
        load_objects(frame.assign(split="trian"), test_fraction=0.5)


def test_two_datasets_as_query_and_gallery(paths: list[Path]) -> None:
    splits = {"query": (PIXELS[:2], ["x", "y"]), "gallery": (paths[2:], ["y", "x", "z", "x"])}
    images = labeled_images(splits)
    assert images.queries.tolist() == [True, True, False, False, False, False]
    assert [images.class_names[label] for label in images.labels] == ["x", "y", "y", "x", "z", "x"]
    assert all(np.array_equal(images.open(row).convert("RGB"), PIXELS[row]) for row in range(6))
    for wrong in ({"query": splits["query"]}, {**splits, "test": splits["query"]}):
        with pytest.raises(ValueError, match="expected train with test, or with query and gallery, got query"):
            load_objects({"train": splits["query"], **wrong}, test_fraction=0.5)


def test_classes_are_divided_without_splits() -> None:
    train, test = load_objects((PIXELS, LABELS), test_fraction=0.4)
    assert (len(train.class_names), len(test.class_names), test.queries) == (2, 1, None)
    train, test = load_objects({"train": (PIXELS, LABELS)}, test_fraction=0.4)
    assert (len(train), len(test)) == (6, 0)


def test_folder_of_images(paths: list[Path]) -> None:
    images = labeled_images(str(paths[0].parent))
    assert (len(images), images.class_names) == (6, ("",))  # directly in the folder: no class
