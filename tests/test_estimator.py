"""ProxyGML on feature vectors: scikit-learn's own checks, unseen classes, streams and what it refuses."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.decomposition import PCA
from sklearn.model_selection import GridSearchCV
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator

from proxygml import ProxyGMLEmbedding, heads
from proxygml.evaluation import neighbours
from proxygml.heads import Moments, choose_links, sharpening, whitening

SHARED = Path(__file__).parents[2] / "shared" / "data" / "cub_efficientnet_lite0.npz"
CHECKS = list(estimator_checks_generator(ProxyGMLEmbedding(epochs=3)))


def birds(classes: int, *, width: int = 24, each: int = 12, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Features whose classes differ in a few directions, and which vary far more in all others: (M, width), (M,)."""
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(classes), each)
    spread = np.where(np.arange(width) < 6, 0.3, 3.0)
    centres = random.normal(size=(classes, width)) * (np.arange(width) < 6)
    features = centres[labels] + random.normal(size=(len(labels), width)) * spread
    turned = np.linalg.qr(np.random.default_rng(7).normal(size=(width, width)))[0]  # the same for all seeds
    return features @ turned, labels


def recall(vectors: np.ndarray, labels: np.ndarray) -> float:
    nearest, _ = neighbours(vectors, count=1)
    return 100 * float(np.mean(labels[nearest[:, 0]] == labels))


@pytest.mark.parametrize("check", [check for _, check in CHECKS], ids=[check.func.__name__ for _, check in CHECKS])
def test_it_passes_the_checks_of_scikit_learn(check) -> None:
    if check.func.__name__ == "check_array_api_input":
        pytest.skip("it takes numpy arrays, not those of the array API")
    check(ProxyGMLEmbedding(epochs=3))


def test_classes_that_it_has_not_seen_are_found_better() -> None:
    features, labels = birds(60)
    unseen, expected = birds(40, seed=1)
    raw = recall(unseen, expected)
    plain = ProxyGMLEmbedding(epochs=1, learning_rate=1e-6, random_state=0).fit(features, labels)
    model = ProxyGMLEmbedding(random_state=0).fit(features, labels)
    assert recall(plain.transform(unseen), expected) > raw + 5  # the whitening alone
    assert recall(model.transform(unseen), expected) > recall(plain.transform(unseen), expected) + 5
    assert model.held_out_score_[model.n_iter_] == max(model.held_out_score_)


def test_few_dimensions_lose_less_than_principal_components_do() -> None:
    features, labels = birds(60)
    unseen, expected = birds(40, seed=1)
    model = ProxyGMLEmbedding(6, random_state=0).fit(features, labels)
    assert model.transform(unseen).shape == (len(unseen), 6)
    assert recall(model.transform(unseen), expected) > recall(PCA(6).fit(features).transform(unseen), expected) + 10


@pytest.mark.skipif(not SHARED.exists(), reason="needs ../shared/data/cub_efficientnet_lite0.npz")
def test_it_helps_on_real_features_of_unseen_birds() -> None:
    arrays = np.load(SHARED)
    features, labels = arrays["vectors"][:, ::2], arrays["labels"]  # half of them: quicker
    seen, unseen = labels < 40, (labels >= 100) & (labels < 140)
    model = ProxyGMLEmbedding(random_state=0, epochs=8).fit(features[seen], labels[seen])
    assert recall(model.transform(features[unseen]), labels[unseen]) > recall(features[unseen], labels[unseen]) + 1


@pytest.mark.parametrize(
    ("classes", "links"), [(2, 4 + 2), (10, 4 + 12), (100, 4 + 100), (10_000, 4 + 100)], ids=lambda value: str(value)
)
def test_every_number_of_classes_has_links_to_negatives(classes: int, links: int) -> None:
    assert choose_links(classes, 4) == links


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_few_classes_are_told_apart(classes: int) -> None:
    features, labels = birds(classes, each=30)
    model = ProxyGMLEmbedding(random_state=0, epochs=10).fit(features, labels)
    others, expected = birds(classes, each=30)[0] + 0.01, labels
    assert recall(model.transform(others), expected) > recall(others, expected)


def test_the_whitening_makes_variance_within_classes_equal_where_it_is_asked_to() -> None:
    features, labels = birds(5, each=200)
    moments = Moments.of(features, labels)
    within, between = moments.within(), moments.between()
    by_hand = np.mean([np.cov(features[labels == label].T, bias=True) for label in range(5)], axis=0)
    np.testing.assert_allclose(within, by_hand, atol=1e-9)
    np.testing.assert_allclose(within + between.T @ between, np.cov(features.T, bias=True), atol=1e-9)
    matrix = whitening(*moments.spectrum(), exponent=0.5, shrinkage=0.0)
    white = matrix @ within @ matrix
    np.testing.assert_allclose(white / white[0, 0], np.eye(len(white)), atol=1e-9)
    quarter = whitening(*moments.spectrum(), exponent=0.25, shrinkage=0.0)
    np.testing.assert_allclose(quarter @ quarter, matrix, atol=1e-9)


def test_the_sharpening_stretches_where_means_of_classes_vary_and_nothing_else() -> None:
    between = np.diag([3.0, 1.0, 0.0, 0.0])[:2]  # variances 9, 1, 0 and 0, on average 2.5
    expected = np.diag([(1 + 9 / 2.5) ** 0.25, (1 + 1 / 2.5) ** 0.25, 1, 1])
    np.testing.assert_allclose(sharpening(between, exponent=0.25), expected, atol=1e-12)
    np.testing.assert_allclose(sharpening(np.zeros((2, 4)), exponent=0.25), np.eye(4))


def test_moments_of_parts_are_those_of_the_whole() -> None:
    features, labels = birds(6)
    whole, parts = Moments.of(features + 1e3, labels), Moments.of(features[:30] + 1e3, labels[:30])
    parts.add(features[30:] + 1e3, labels[30:])
    np.testing.assert_allclose(parts.mean(), whole.mean())
    np.testing.assert_allclose(parts.within(), whole.within(), atol=1e-7)
    np.testing.assert_allclose(parts.between(), whole.between(), atol=1e-7)


def test_a_stream_in_parts_with_new_classes_is_learned_from() -> None:
    features, labels = birds(40)
    unseen, expected = birds(40, seed=1)
    names = np.array([f"class {39 - label}" for label in range(40)])  # new ones sort before known ones
    model = ProxyGMLEmbedding(random_state=0)
    for _ in range(10):
        for part in np.array_split(np.arange(len(features)), 6):
            model.partial_fit(features[part], names[labels[part]])
    assert sorted(model.classes_) == sorted(names)
    assert model.n_iter_ == 60
    assert recall(model.transform(unseen), expected) > recall(unseen, expected) + 10
    revived = pickle.loads(pickle.dumps(model)).partial_fit(features[:50], names[labels[:50]])
    np.testing.assert_array_equal(revived.components_, model.partial_fit(features[:50], names[labels[:50]]).components_)


def test_a_stream_may_bring_one_class_after_another() -> None:
    features, labels = birds(40)
    unseen, expected = birds(40, seed=1)
    model = ProxyGMLEmbedding(random_state=0)
    for label in range(40):
        model.partial_fit(features[labels == label], labels[labels == label])
        assert np.isfinite(model.transform(unseen)).all()
    assert recall(model.transform(unseen), expected) > recall(unseen, expected) + 5


def test_fit_ends_a_stream() -> None:
    features, labels = birds(4)
    model = ProxyGMLEmbedding(random_state=0, epochs=2).partial_fit(features, labels).fit(features[:, :10], labels)
    assert model.partial_fit(features, labels).n_iter_ == 1
    assert model.transform(features).shape == features.shape


def test_it_works_with_names_in_pipelines_and_searches() -> None:
    features, labels = birds(4, each=20)
    names = np.array(["wren", "crow", "jay", "tit"])[labels]
    pipeline = make_pipeline(StandardScaler(), ProxyGMLEmbedding(epochs=3, random_state=0), KNeighborsClassifier(3))
    search = GridSearchCV(pipeline, {"proxygmlembedding__n_components": [2, 8]}, cv=3).fit(features, names)
    assert search.best_params_["proxygmlembedding__n_components"] == 8
    assert set(search.predict(features)) <= set(names)
    fitted = search.best_estimator_["proxygmlembedding"]
    copy = pickle.loads(pickle.dumps(fitted))
    np.testing.assert_array_equal(copy.transform(features), fitted.transform(features))
    assert not hasattr(clone(fitted), "components_")
    assert fitted.get_feature_names_out()[0] == "proxygmlembedding0"


def test_seeds_repeat_and_the_callers_random_numbers_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "MOST_CLASSIFIED", 20)  # of 48 proxies: some are drawn
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


def test_float16_in_a_memory_map_is_taken(tmp_path: Path) -> None:
    features, labels = birds(4)
    np.save(tmp_path / "features.npy", features.astype(np.float16))
    mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
    vectors = ProxyGMLEmbedding(epochs=2).fit(mapped, labels).transform(mapped)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_roots_are_taken_of_features_that_are_never_negative() -> None:
    features, labels = birds(4)
    assert ProxyGMLEmbedding(epochs=1).fit(features, labels).power_ == 1
    assert ProxyGMLEmbedding(epochs=1).fit(features - features.min(), labels).power_ == 0.5
    assert ProxyGMLEmbedding(epochs=1, power=0.7).fit(features, labels).power_ == 0.7


def test_a_column_that_is_constant_and_a_class_with_one_sample_do_no_harm() -> None:
    features, labels = birds(5)
    features[:, 3] = 7.0
    vectors = ProxyGMLEmbedding(epochs=2).fit(features[:49], labels[:49]).transform(features)
    assert np.isfinite(vectors).all()
    lone = ProxyGMLEmbedding(epochs=2).fit(features[::12], labels[::12])  # of every class one
    assert np.isfinite(lone.transform(features)).all()


def test_a_bar_is_shown_when_it_is_asked_for(capsys: pytest.CaptureFixture) -> None:
    for classes in (12, 3):  # of three none are held out
        ProxyGMLEmbedding(epochs=2, progress=True).fit(*birds(classes))
    shown = capsys.readouterr().out
    assert "finding out for how long" in shown
    assert "learning" in shown


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        (lambda x, y: (x, np.zeros(len(y))), {}, "at least two classes, got 1 class"),
        (lambda x, y: (x[:, 0], y), {}, "Expected 2D array, got 1D array instead: Reshape your data: "),
        (lambda x, y: (x[:-1], y), {}, "inconsistent numbers of samples"),
        (lambda x, y: (np.where(x > 2, np.nan, x), y), {}, "contains NaN"),
        (lambda x, y: (np.ones_like(x), y), {}, "features that vary, got 48 equal samples"),
        (lambda x, y: (x * 1e200, y), {}, "features between 1e-100 and 1e100, got up to"),
        (lambda x, y: (x * 1e-200, y), {}, "features between 1e-100 and 1e100, got up to"),
        (lambda x, y: (x, y + 0.5), {}, "Unknown label type"),
        (lambda x, y: (x, y), {"n_components": 25}, "n_components up to 24, as X has features, got 25"),
        (lambda x, y: (x, y), {"n_components": 0}, "n_components as a whole number of at least 1, got 0"),
        (lambda x, y: (x, y), {"power": -1.0}, "power above 0, got -1.0"),
        (lambda x, y: (x, y), {"held_out": 1.0}, "expected held_out as a share, below 1, got 1.0"),
        (lambda x, y: (x, y), {"learning_rate": 0.0}, "learning_rate above 0"),
        (lambda x, y: (x, y), {"proxies_per_class": 0}, "proxies_per_class as a whole number"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_with_the_reason(change, settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        ProxyGMLEmbedding(epochs=1, **settings).fit(*change(*birds(4)))
    assert "\n" not in str(caught.value)
