"""What a number of minutes is used for."""

from pathlib import Path

import pytest
from PIL import Image

from proxygml.display import no_progress
from proxygml.training import budget
from proxygml.training.budget import fit_to_minutes
from proxygml.training.parts import Parts
from proxygml.training.recipe import Recipe

FORWARD, STEP = 0.01, 0.04  # seconds per image; a step at 224 pixels


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The preset for 20 classes of 10 photos, half of them for testing, on a machine of known speed."""
    for number in range(200):
        path = tmp_path / f"class{number % 20}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)

    def seconds(recipe: Recipe, parts: Parts, images: object, *, train: bool) -> float:
        return STEP * (recipe.image_size / 224) ** 2 if train else FORWARD

    monkeypatch.setattr(budget, "_seconds_per_image", seconds)
    return Recipe.preset("photos", data=str(tmp_path), cache=None)


START = FORWARD * (2 * 100 + 2 * 100)  # features and fit; both networks on the test images


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (START + 4 * 100 * STEP, (224, 4)),  # exactly four epochs at the test size
        (START + 4 * 100 * STEP - 0.1, (192, 5)),
        (START + 1e6, (224, 12)),  # more epochs hardly help
        (START + 100 * STEP * (128 / 224) ** 2, (128, 1)),
        (START, (224, 0)),  # only the head
    ],
)
def test_the_largest_size_with_enough_epochs(photos: Recipe, seconds: float, expected: tuple[int, int]) -> None:
    recipe = fit_to_minutes(photos, (seconds + 1e-6) / 60 / budget.SAFETY, Parts(), no_progress)
    assert (recipe.image_size, recipe.epochs) == expected
    assert recipe.max_class_size is None
    assert (recipe.held_out == 0) == (recipe.epochs == 0)  # no epoch to choose


def test_too_many_photos_are_cut_to_some_of_each_class(photos: Recipe) -> None:
    said: list[str] = []
    recipe = fit_to_minutes(photos, 3 / 60 / budget.SAFETY, Parts(), lambda *line: said.append(f"{line[0]}: {line[3]}"))
    assert (recipe.epochs, recipe.max_class_size) == (0, 5)  # 2 of 4 seconds are those of the test images
    assert (
        said[-1]
        == "0.0555556 minutes: only the head on frozen features, of 5 images per class: 0 minutes would use all"
    )


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), float("inf")])
def test_no_minutes_are_an_error(photos: Recipe, minutes: float) -> None:
    with pytest.raises(ValueError, match="expected minutes above 0, got"):
        fit_to_minutes(photos, minutes, Parts(), no_progress)


def test_only_presets_for_photos_take_minutes() -> None:
    with pytest.raises(ValueError, match="minutes needs a preset for photos"):
        fit_to_minutes(Recipe.preset("glyphs"), 1.0, Parts(), no_progress)
