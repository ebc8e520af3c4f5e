"""ProxyGML on feature vectors: scikit-learn's estimator checks, unseen classes, streams, invalid input."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.covariance import oas
from sklearn.decomposition import PCA
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

from proxygml import ProxyGMLEmbedding
from proxygml.evaluation import neighbors
from proxygml.features import estimator
from proxygml.features.head import Moments, default_links, sampling_shrinkage, sharpening, whitening

SHARED = Path(__file__).parents[3] / "shared" / "data" / "cub_efficientnet_lite0.npz"
CHECKS = list(estimator_checks_generator(ProxyGMLEmbedding(epochs=1)))


def birds(classes: int, *, width: int = 24, each: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features (M, width) with class means in six directions and more noise in all others; labels (M,)."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), each)
    scale = np.where(np.arange(width) < 6, 0.3, 3.0)
    centers = rng.normal(size=(classes, width)) * (np.arange(width) < 6)
    features = centers[labels] + rng.normal(size=(len(labels), width)) * scale
    rotation = np.linalg.qr(np.random.default_rng(7).normal(size=(width, width)))[0]  # the same for all seeds
    return features @ rotation, labels


def recall(vectors: np.ndarray, labels: np.ndarray) -> float:
    nearest, _ = neighbors(vectors, count=1)
    return 100 * float(np.mean(labels[nearest[:, 0]] == labels))


@pytest.mark.parametrize("check", [check for _, check in CHECKS], ids=[check.func.__name__ for _, check in CHECKS])
def test_scikit_learn_estimator_checks(check) -> None:
    if check.func.__name__ == "check_array_api_input":
        pytest.skip("numpy arrays only")
    check(ProxyGMLEmbedding(epochs=1))


@pytest.mark.slow
def test_unseen_classes_improve() -> None:
    features, labels = birds(60, each=16)
    unseen, expected = birds(40, seed=1)
    raw = recall(unseen, expected)
    plain = ProxyGMLEmbedding(epochs=1, learning_rate=1e-6, random_state=0).fit(features, labels)
    model = ProxyGMLEmbedding(random_state=0, epochs=12).fit(features, labels)
    assert recall(plain.transform(unseen), expected) > raw + 5  # the whitening alone
    assert recall(model.transform(unseen), expected) > recall(plain.transform(unseen), expected) + 5
    assert model.held_out_score_[model.n_iter_] == max(model.held_out_score_)


@pytest.mark.slow
def test_low_dimensions_beat_pca() -> None:
    features, labels = birds(60, each=16)
    unseen, expected = birds(40, seed=1)
    model = ProxyGMLEmbedding(6, random_state=0, epochs=5).fit(features, labels)
    assert model.transform(unseen).shape == (len(unseen), 6)
    assert recall(model.transform(unseen), expected) > recall(PCA(6).fit(features).transform(unseen), expected) + 10


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data/cub_efficientnet_lite0.npz")
@pytest.mark.slow
def test_unseen_birds_improve() -> None:
    arrays = np.load(SHARED)
    features, labels = arrays["vectors"][:, ::2], arrays["labels"]  # half of them: quicker
    seen, unseen = labels < 40, (labels >= 100) & (labels < 140)
    model = ProxyGMLEmbedding(random_state=0, epochs=8).fit(features[seen], labels[seen])
    assert recall(model.transform(features[unseen]), labels[unseen]) > recall(features[unseen], labels[unseen]) + 1


@pytest.mark.parametrize(
    ("classes", "links"), [(2, 4 + 2), (10, 4 + 12), (100, 4 + 100), (10_000, 4 + 100)], ids=lambda value: str(value)
)
def test_default_links_include_negatives(classes: int, links: int) -> None:
    assert default_links(classes, 4) == links


@pytest.mark.parametrize("classes", [2, 3])
def test_few_classes_improve(classes: int) -> None:
    features, labels = birds(classes, each=30)
    model = ProxyGMLEmbedding(random_state=0, epochs=10).fit(features, labels)
    others, expected = birds(classes, each=30)[0] + 0.01, labels
    assert recall(model.transform(others), expected) > recall(others, expected)


def test_whitening_equalizes_within_class_variance() -> None:
    features, labels = birds(5, each=200)
    moments = Moments(features, labels)
    within, between = moments.within(), moments.between()
    by_hand = np.mean([np.cov(features[labels == label].T, bias=True) for label in range(5)], axis=0)
    np.testing.assert_allclose(within, by_hand, atol=1e-9)
    np.testing.assert_allclose(within + between.T @ between, np.cov(features.T, bias=True), atol=1e-9)
    matrix = whitening(*moments.spectrum(), exponent=0.5, shrinkage=0.0)
    white = matrix @ within @ matrix
    np.testing.assert_allclose(white / white[0, 0], np.eye(len(white)), atol=1e-9)
    quarter = whitening(*moments.spectrum(), exponent=0.25, shrinkage=0.0)
    np.testing.assert_allclose(quarter @ quarter, matrix, atol=1e-9)


@pytest.mark.parametrize("samples", [5, 40, 4000])
def test_few_samples_are_shrunk_as_scikit_learn_does(samples: int) -> None:
    features = np.random.default_rng(0).normal(size=(samples, 12)) * np.arange(1, 13)
    expected = oas(features)[1]
    variances = np.linalg.eigvalsh(np.cov(features.T, bias=True))
    assert sampling_shrinkage(variances, samples) == pytest.approx(expected)
    assert sampling_shrinkage(np.ones(12), samples) == sampling_shrinkage(np.zeros(12), samples) == 1


def test_sharpening_stretches_between_class_directions() -> None:
    between = np.diag([3.0, 1.0, 0.0, 0.0])[:2]  # variances 9, 1, 0, 0 with mean 2.5
    expected = np.diag([(1 + 9 / 2.5) ** 0.25, (1 + 1 / 2.5) ** 0.25, 1, 1])
    np.testing.assert_allclose(sharpening(between, exponent=0.25), expected, atol=1e-12)
    np.testing.assert_allclose(sharpening(np.zeros((2, 4)), exponent=0.25), np.eye(4))


def test_moments_accumulate() -> None:
    features, labels = birds(6)
    whole, parts = Moments(features + 1e3, labels), Moments(features[:30] + 1e3, labels[:30])
    parts.add(features[30:] + 1e3, labels[30:])
    np.testing.assert_allclose(parts.mean(), whole.mean())
    np.testing.assert_allclose(parts.within(), whole.within(), atol=1e-7)
    np.testing.assert_allclose(parts.between(), whole.between(), atol=1e-7)


@pytest.mark.slow
def test_stream_with_new_classes() -> None:
    features, labels = birds(40)
    unseen, expected = birds(40, seed=1)
    names = np.array([f"class {39 - label}" for label in range(40)])  # new names sort before old ones
    model = ProxyGMLEmbedding(random_state=0)
    for _ in range(4):
        for part in np.array_split(np.arange(len(features)), 6):
            model.partial_fit(features[part], names[labels[part]])
    assert sorted(model.classes_) == sorted(names)
    assert model.n_iter_ == 24
    assert recall(model.transform(unseen), expected) > recall(unseen, expected) + 10
    revived = pickle.loads(pickle.dumps(model)).partial_fit(features[:50], names[labels[:50]])
    np.testing.assert_array_equal(revived.components_, model.partial_fit(features[:50], names[labels[:50]]).components_)


@pytest.mark.slow
def test_stream_of_one_class_at_a_time() -> None:
    features, labels = birds(40)
    unseen, expected = birds(40, seed=1)
    model = ProxyGMLEmbedding(random_state=0)
    for label in range(40):
        model.partial_fit(features[labels == label], labels[labels == label])
        assert np.isfinite(model.transform(unseen)).all()
    assert recall(model.transform(unseen), expected) > recall(unseen, expected) + 5


def test_fit_ends_stream() -> None:
    features, labels = birds(4)
    model = ProxyGMLEmbedding(random_state=0, epochs=2).partial_fit(features, labels).fit(features[:, :10], labels)
    assert model.partial_fit(features, labels).n_iter_ == 1
    assert model.transform(features).shape == features.shape


@pytest.mark.slow
def test_pipeline_and_grid_search() -> None:
    features, labels = birds(24, each=36)
    names = np.char.add("bird ", labels.astype(str))
    pipeline = make_pipeline(StandardScaler(), ProxyGMLEmbedding(epochs=3, random_state=0), KNeighborsClassifier(3))
    search = GridSearchCV(pipeline, {"proxygmlembedding__n_components": [2, 8]}, cv=3).fit(features, names)
    assert search.best_params_["proxygmlembedding__n_components"] == 8
    assert set(search.predict(features)) <= set(names)
    fitted = search.best_estimator_["proxygmlembedding"]
    copy = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(copy.transform(features), fitted.transform(features))
    assert not hasattr(clone(fitted), "components_")
    assert fitted.get_feature_names_out()[0] == "proxygmlembedding0"


def test_seed_and_global_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimator, "MAX_PROXY_ROWS", 20)  # of 48 proxies
    features, labels = birds(12)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first, second, other = (
        ProxyGMLEmbedding(epochs=2, held_out=0, random_state=seed).fit(features, labels).components_
        for seed in (0, 0, 1)
    )
    assert torch.rand(1) == expected
    np.testing.assert_array_equal(first, second)
    assert np.abs(first - other).max() > 1e-6


def test_float16_memory_map(tmp_path: Path) -> None:
    features, labels = birds(4)
    np.save(tmp_path / "features.npy", features.astype(np.float16))
    mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
    vectors = ProxyGMLEmbedding(epochs=2).fit(mapped, labels).transform(mapped)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_power_is_one_half_without_negatives() -> None:
    features, labels = birds(4)
    assert ProxyGMLEmbedding(epochs=1).fit(features, labels).power_ == 1
    assert ProxyGMLEmbedding(epochs=1).fit(features - features.min(), labels).power_ == 0.5
    assert ProxyGMLEmbedding(epochs=1, power=0.7).fit(features, labels).power_ == 0.7


def test_constant_columns_and_lone_samples() -> None:
    features, labels = birds(5)
    features[:, 3] = 7.0
    vectors = ProxyGMLEmbedding(epochs=2).fit(features[:49], labels[:49]).transform(features)
    assert np.isfinite(vectors).all()
    lone = ProxyGMLEmbedding(epochs=2).fit(features[::12], labels[::12])  # one sample per class
    assert np.isfinite(lone.transform(features)).all()


def test_progress_is_reported() -> None:
    reports: list[tuple[str, int, int]] = []

    def report(what: str, done: int, total: int, note: str) -> None:
        reports.append((what, done, total))

    for classes in (24, 12):  # of twelve, none is held out
        ProxyGMLEmbedding(epochs=2, progress=report, random_state=0).fit(*birds(classes, each=36))
    assert reports[:3] == [("early stopping", done, 3) for done in (1, 2, 3)]
    assert reports[-2:] == [("fitting", 1, 2), ("fitting", 2, 2)]


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (lambda x, y: (x, np.zeros(len(y))), {}, "at least two classes, got 1 class"),
        (lambda x, y: (x[:, 0], y), {}, "Expected 2D array, got 1D array instead"),
        (lambda x, y: (x[:-1], y), {}, "inconsistent numbers of samples"),
        (lambda x, y: (np.where(x > 2, np.nan, x), y), {}, "contains NaN"),
        (lambda x, y: (np.ones_like(x), y), {}, "features that vary, got 48 equal samples"),
        (lambda x, y: (x * 1e200, y), {}, "features between 1e-100 and 1e100, got up to"),
        (lambda x, y: (x * 1e-200, y), {}, "features between 1e-100 and 1e100, got up to"),
        (lambda x, y: (x, y + 0.5), {}, "Unknown label type"),
        (lambda x, y: (x, y), {"n_components": 25}, "n_components up to 24, the number of features, got 25"),
        (lambda x, y: (x, y), {"n_components": 0}, "n_components as a whole number of at least 1, got 0"),
        (lambda x, y: (x, y), {"power": -1.0}, "power above 0, got -1.0"),
        (lambda x, y: (x, y), {"held_out": 1.0}, "expected held_out as a fraction below 1, got 1.0"),
        (lambda x, y: (x, y), {"learning_rate": 0.0}, "learning_rate above 0"),
        (lambda x, y: (x, y), {"proxies_per_class": 0}, "proxies_per_class as a whole number"),
    ],
)
def test_invalid_input_raises(change, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProxyGMLEmbedding(epochs=1, **settings).fit(*change(*birds(4)))
