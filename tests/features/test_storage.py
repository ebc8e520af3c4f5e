"""A fitted space in a folder: the same after loading, and one line for what is no space."""

import json
from pathlib import Path

import numpy as np
import pytest

from proxygml import ProxyGMLEmbedding
from proxygml.features.storage import NUMBERS, SETTINGS
from proxygml.files import with_checksum
from tests.features.test_estimator import birds

FEATURES, LABELS = birds(24, each=36)


@pytest.fixture(scope="module")
def fitted() -> ProxyGMLEmbedding:
    return ProxyGMLEmbedding(6, epochs=2, random_state=0).fit(FEATURES, np.array([f"bird {n:02}" for n in LABELS]))


@pytest.fixture
def space(fitted: ProxyGMLEmbedding, tmp_path: Path) -> Path:
    fitted.save(tmp_path / "space")
    return tmp_path / "space"


def edit(space: Path, **changes: object) -> None:
    settings = json.loads((space / SETTINGS).read_text()) | changes
    settings.pop("checksum")
    (space / SETTINGS).write_text(json.dumps(with_checksum(settings)))


def test_space_is_the_same_after_loading(fitted: ProxyGMLEmbedding, space: Path) -> None:
    loaded = ProxyGMLEmbedding.load(str(space))
    np.testing.assert_array_equal(loaded.transform(FEATURES), fitted.transform(FEATURES))
    assert loaded.get_params() == fitted.get_params()
    assert loaded.classes_.tolist() == fitted.classes_.tolist()
    assert loaded.held_out_scores_ == fitted.held_out_scores_
    for name in ("n_iter_", "power_", "whitening_", "sharpening_", "held_out_score_", "n_features_in_"):
        assert getattr(loaded, name) == getattr(fitted, name)
    again = loaded.fit(FEATURES, LABELS).components_
    np.testing.assert_array_equal(again, fitted.components_)


def test_loaded_space_starts_a_stream(space: Path) -> None:
    loaded = ProxyGMLEmbedding.load(space).partial_fit(FEATURES, LABELS)
    assert (loaded.n_iter_, loaded.held_out_scores_) == (1, {})


def test_parameters_of_numpy_are_saved(tmp_path: Path) -> None:
    random, power = np.random.RandomState(0), np.float32(0.5)
    model = ProxyGMLEmbedding(np.int64(4), epochs=1, power=power, random_state=random).fit(FEATURES, LABELS)
    model.save(tmp_path)
    loaded = ProxyGMLEmbedding.load(tmp_path)
    assert (loaded.n_components, loaded.power, loaded.random_state) == (4, 0.5, None)
    np.testing.assert_array_equal(loaded.transform(FEATURES), model.transform(FEATURES))


def test_held_out_scores_before_and_after(fitted: ProxyGMLEmbedding) -> None:
    assert list(fitted.held_out_scores_) == ["features", "whitened", "trained"]
    for scores, history in (("whitened", fitted.held_out_score_[0]), ("trained", max(fitted.held_out_score_))):
        kept = fitted.held_out_scores_[scores]
        assert 50 * (kept.recall[1] + kept.map_at_r) == history
    assert fitted.held_out_scores_["features"].classes == 6
    assert ProxyGMLEmbedding(epochs=1, held_out=0).fit(FEATURES, LABELS).held_out_scores_ == {}


def test_no_space_is_one_line(space: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no space.json in .*: not a fitted space, `proxygml fit` makes one"):
        ProxyGMLEmbedding.load(tmp_path)
    (space / NUMBERS).unlink()
    with pytest.raises(FileNotFoundError, match=r"space.safetensors does not exist"):
        ProxyGMLEmbedding.load(space)


def test_newer_version_is_one_line(space: Path) -> None:
    edit(space, schema_version=2, version="9.0")
    with pytest.raises(ValueError, match=r"space was written by proxygml 9.0, this is .*: update proxygml"):
        ProxyGMLEmbedding.load(space)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fitted": {}}, "is damaged .*: fit the space again"),
        ({"fitted": []}, "is damaged .*: fit the space again"),
        ({"parameters": 3}, "is damaged .*: fit the space again"),
        ({"parameters": {"exec": 1}}, "Invalid parameter 'exec'"),
        ({"id": "0"}, "is damaged, or not of this space.json: fit the space again"),
    ],
)
def test_damaged_settings_are_one_line(space: Path, changes: dict, message: str) -> None:
    edit(space, **changes)
    with pytest.raises(ValueError, match=message):
        ProxyGMLEmbedding.load(space)


def test_damaged_files_are_one_line(space: Path) -> None:
    settings, numbers = (space / SETTINGS).read_bytes(), (space / NUMBERS).read_bytes()
    for content in (b"", b"[]", b"{}", settings[:-9], settings.replace(b'"epochs": 2', b'"epochs": 3')):
        (space / SETTINGS).write_bytes(content)
        with pytest.raises(ValueError, match=r"space.json is damaged \(.*\): fit the space again"):
            ProxyGMLEmbedding.load(space)
    (space / SETTINGS).write_bytes(settings)
    for content in (b"", numbers[:-1], numbers[:-8] + b"\0" * 8):
        (space / NUMBERS).write_bytes(content)
        with pytest.raises(ValueError, match=r"space.safetensors is damaged, or not of this space.json"):
            ProxyGMLEmbedding.load(space)
