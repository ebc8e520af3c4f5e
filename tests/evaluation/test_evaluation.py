"""Neighbors and scores against exact loops, other libraries and values computed by hand."""

import json
from contextlib import contextmanager
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from proxygml.evaluation import Scores, clustering, counting, evaluate, neighbors, nmi, ranks

LABELS = [-7, 0, 3, 2**24, 2**24 + 1, 2**60, 2**60 + 1]  # gaps, a negative, pairs that floats would merge


def ranked(query, gallery, own=None):
    """Indices of the gallery by exact squared distance, then by index; excludes `own`."""
    squared = [sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(query, row, strict=True)) for row in gallery]
    return sorted((i for i in range(len(gallery)) if i != own), key=lambda i: (squared[i], i))


def in_tie_order(values):
    """Values of all items in the random order by which `evaluate` ranks ties."""
    return [values[i] for i in torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]


def scores_by_loop(vectors, labels, gallery, gallery_labels, counts):
    """Recalls, R-precision, MAP@R and the number of lone queries from their definitions."""
    alone = gallery is None
    if alone:
        vectors, labels = in_tie_order(vectors), in_tie_order(labels)
    else:
        gallery, gallery_labels = in_tie_order(gallery), in_tie_order(gallery_labels)
    gallery, gallery_labels = (vectors, labels) if alone else (gallery, gallery_labels)
    recalls, precision, average, lone = dict.fromkeys(counts, 0), 0, 0, 0
    for i, (vector, label) in enumerate(zip(vectors, labels, strict=True)):
        hits = [gallery_labels[j] == label for j in ranked(vector, gallery, own=i if alone else None)]
        total = sum(hits)
        recalls = {n: recalls[n] + any(hits[:n]) for n in counts}
        lone += total == 0
        if total:
            precision += Fraction(sum(hits[:total]), total)
            average += sum(Fraction(sum(hits[: k + 1]), k + 1) for k in range(total) if hits[k]) / total
    recalls = {n: hits / len(vectors) for n, hits in recalls.items()}
    return recalls, float(precision / len(vectors)), float(average / len(vectors)), lone


@contextmanager
def engine(name):
    """Only the named engine computes ranks: "counting" or "search"."""
    with pytest.MonkeyPatch.context() as patch:
        if name == "search":
            patch.setattr(ranks, "MAX_COUNTED", -1)
        patch.delattr(ranks, "nearest_in_blocks" if name == "counting" else "count_ranks")
        yield


def random_case(images=60, dimensions=16):
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 7, images)
    vectors = generator.normal(size=(images, dimensions)) + 0.7 * generator.normal(size=(7, dimensions))[labels]
    return vectors.astype(np.float32), labels


@pytest.mark.parametrize("name", ["counting", "search"])
@settings(max_examples=100, deadline=None)
@given(data=st.data(), width=st.integers(1, 3), alone=st.booleans(), block=st.integers(1, 11))
@pytest.mark.slow
def test_scores_equal_exact_loop_with_ties(name, data, width, alone, block):
    # A small integer grid is full of ties and duplicates. A common offset must not cost digits.
    item = st.tuples(st.tuples(*[st.integers(10**9, 10**9 + 3)] * width), st.sampled_from(LABELS))
    vectors, labels = zip(*data.draw(st.lists(item, min_size=2, max_size=10)), strict=True)
    assume(name == "search" or len(set(vectors)) > 1)  # equal vectors are always searched
    items = data.draw(st.lists(item, min_size=1, max_size=10))
    gallery, gallery_labels = (None, None) if alone else zip(*items, strict=True)
    counts = data.draw(st.lists(st.integers(1, 14), max_size=4, unique=True))
    options = {"gallery": gallery, "gallery_labels": gallery_labels, "recall_at": counts}
    with engine(name):
        scores = evaluate(np.array(vectors, dtype=np.float64), labels, cluster=False, block=block, **options)
    recalls, precision, average, lone = scores_by_loop(vectors, labels, gallery, gallery_labels, counts)
    assert scores.recall == recalls
    assert [scores.r_precision, scores.map_at_r] == pytest.approx([precision, average], rel=1e-12, abs=0)
    assert (scores.lone_queries, scores.images, scores.classes) == (lone, len(vectors), len(set(labels)))


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("block", [None, 1, 7, 64])
def test_neighbors_equal_exact_loop(unit, block):
    vectors, _ = random_case(images=40, dimensions=9)
    vectors *= np.geomspace(0.1, 1000, 40, dtype=np.float32)[:, None]  # arbitrary norms
    if unit:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    expected = [ranked(vector.tolist(), vectors.tolist(), own=i) for i, vector in enumerate(vectors)]
    indices, distances = neighbors(vectors, count=39, block=block)
    assert indices.tolist() == expected
    exact = np.linalg.norm(vectors[:, None].astype(np.float64) - vectors[indices], axis=2)
    np.testing.assert_allclose(distances, exact, rtol=1e-9)
    assert neighbors(vectors, count=5, block=block)[0].tolist() == [row[:5] for row in expected]


@pytest.mark.parametrize("count", [1, 40, 300])
@pytest.mark.parametrize("block", [None, 1, 37])
def test_duplicates_are_ordered_by_index(count, block):
    generator = np.random.default_rng(1)
    distinct, which = generator.normal(size=(30, 512)), generator.integers(0, 30, 301)  # odd: equal columns round apart
    distinct[:, 0] = 0
    squared = ((distinct[:, None] - distinct) ** 2).sum(2)[which][:, which]
    np.fill_diagonal(squared, np.inf)
    vectors = distinct[which]
    vectors[-1, 0] = -0.0  # equals 0
    indices, distances = neighbors(vectors, count=count, block=block)
    assert (indices == squared.argsort(axis=1, kind="stable")[:, :count]).all()
    assert ((distances == 0) == (which[indices] == which[:, None])).all()


def test_cancellation_keeps_the_order():
    points = np.array([[1.0], [1.0 + 3e-9], [1.0 + 1e-9], [-1.0], [0.0]])  # |x|² + |y|² - 2xy is rounded to 0 or 2e-16
    indices, distances = neighbors(points[:1], points[1:], count=4)
    assert indices.tolist() == [[1, 0, 3, 2]]
    np.testing.assert_allclose(distances, [[1e-9, 3e-9, 1, 2]], rtol=1e-6)


def test_score_of_equal_vectors_is_fair():
    sorted_labels, interleaved = np.arange(200) // 40, np.arange(200) % 5  # by index, Recall@8 would be 0.2 and 0.995
    for labels in (sorted_labels, interleaved):
        scores = [evaluate(np.ones((200, 4)), labels, cluster=False, seed=seed).recall for seed in range(40)]
        assert np.mean([recall[1] for recall in scores]) == pytest.approx(0.2, abs=0.01)
        assert np.mean([recall[8] for recall in scores]) == pytest.approx(1 - 0.8**8, abs=0.06)


def test_recall_of_four_points_by_hand():
    scores = evaluate([[0.0], [1], [10], [11]], [0, 1, 0, 1], recall_at=(1, 2, 3, 100), cluster=False)
    assert scores.recall == {1: 0.0, 2: 0.5, 3: 1.0, 100: 1.0}
    assert scores.r_precision == scores.map_at_r == 0.0


def test_metrics_of_one_query_by_hand():
    # Neighbors, nearest first: other, own, own, other, own. R = 3, and two of the three nearest are positives.
    options = {"gallery": [[1.0], [2], [3], [4], [5]], "gallery_labels": [0, 7, 7, 0, 7], "recall_at": (1, 2)}
    scores = evaluate([[0.0]], [7], cluster=False, **options)
    assert scores.recall == {1: 0.0, 2: 1.0}
    assert scores.r_precision == pytest.approx(2 / 3)
    assert scores.map_at_r == pytest.approx((1 / 2 + 2 / 3) / 3)


def unit_vectors(images=700):
    """Signs / 8 and copies: unit vectors with products that are exact in float32 for any order of summation."""
    generator = np.random.default_rng(0)
    labels = generator.permutation(np.arange(images) % 60)
    flipped = generator.random((images, 64)) < 0.3
    signs = np.where((generator.random((60, 64)) < 0.5)[labels] ^ flipped, -1, 1)
    signs[generator.integers(0, images, 150)] = signs[generator.integers(0, images, 150)]
    return (signs / 8).astype(np.float32), labels


@pytest.mark.parametrize("name", ["counting", "search"])
@pytest.mark.parametrize("index", ["IndexFlatIP", "IndexFlatL2"])
def test_recall_equals_faiss(name, index):
    import faiss

    vectors, labels = unit_vectors()
    exact = getattr(faiss, index)(64)
    exact.add(vectors)
    values, items = exact.search(vectors, len(vectors))  # (M, M) each
    distances = np.empty(values.shape)
    np.put_along_axis(distances, items, -values if index == "IndexFlatIP" else values, axis=1)
    np.fill_diagonal(distances, np.inf)
    drawn = np.array(in_tie_order(range(len(vectors))))  # (M,)
    order = drawn[distances[:, drawn].argsort(axis=1, kind="stable")][:, :-1]  # (M, M - 1); without itself
    first_hit = (labels[order] == labels[:, None]).argmax(axis=1)  # (M,)
    counts = range(1, len(vectors))
    with engine(name):
        scores = evaluate(vectors, labels, recall_at=counts, cluster=False)
    assert scores.recall == {n: (first_hit < n).mean() for n in counts}
    ordered = np.sort(distances, axis=1)
    tied = (ordered[:, :-2] == ordered[:, 1:-1]).mean()
    assert tied > 0.9
    assert 0.1 < scores.recall[1] < 0.8


@pytest.mark.parametrize("gap", [1e-4, 1e-8, 1e-12])
@pytest.mark.slow
def test_counting_resolves_float32_ties_in_float64(gap):
    generator = np.random.default_rng(0)
    vectors = generator.normal(size=(6, 12))[np.arange(72) % 6] + gap * generator.normal(size=(72, 12))
    labels = generator.integers(0, 20, 72)
    with engine("counting"):
        counted = evaluate(vectors, labels, recall_at=range(1, 30), cluster=False)
    recalls, precision, average, lone = scores_by_loop(vectors.tolist(), labels, None, None, range(1, 30))
    assert (counted.recall, counted.lone_queries) == (recalls, lone)
    assert [counted.r_precision, counted.map_at_r] == pytest.approx([precision, average], rel=1e-12)


def test_products_bound_distances():
    generator = np.random.default_rng(0)
    vectors = torch.from_numpy(generator.normal(size=(300, 700)) * np.geomspace(1e-9, 1e9, 300)[:, None])
    vectors[150:] = vectors[:150] * (1 + 1e-5 * torch.from_numpy(generator.normal(size=(150, 1))))  # these cancel
    side = counting._prepare(vectors, torch.zeros(300, dtype=torch.int64), vectors[0])
    left = torch.cat([-side.rounded[:, :-2], side.rounded[:, -2:].flip(1)], 1)
    bounds, exact = (left @ side.rounded.T).double(), counting._distances(vectors, vectors)  # (M, M) each
    assert (bounds <= exact).all()
    assert (exact <= bounds + side.slack[:, None] + side.slack).all()


def test_counting_is_chosen_where_float32_suffices(monkeypatch):
    def countable(vectors, positives=5):
        vectors = torch.from_numpy(vectors).double()
        return ranks._countable(vectors, vectors, torch.full((len(vectors),), positives), vectors[0])

    vectors, _ = random_case(images=600, dimensions=64)
    assert countable(vectors)
    assert countable(1e8 * vectors)
    assert not countable(1e12 * vectors)
    assert not countable(1e-12 * vectors)
    assert not countable(vectors, positives=2000)
    assert not countable(vectors[np.arange(600) % 4])  # 150 copies of each


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_matmul_precision_does_not_matter(precision):
    vectors, labels = random_case(images=100, dimensions=200)
    expected = evaluate(vectors, labels, cluster=False)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert evaluate(vectors, labels, cluster=False) == expected
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("with_gallery", [False, True])
def test_scores_equal_pytorch_metric_learning(with_gallery):
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    vectors, labels = random_case(images=500)
    gallery, gallery_labels = (vectors[300:], labels[300:]) if with_gallery else (None, None)
    vectors, labels = vectors[:300], labels[:300]
    include = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
    calculator = AccuracyCalculator(include=include, k="max_bin_count", device=torch.device("cpu"))
    theirs = calculator.get_accuracy(vectors, labels, gallery, gallery_labels)
    ours = evaluate(vectors, labels, gallery=gallery, gallery_labels=gallery_labels, cluster=False)
    assert 0.2 < ours.map_at_r < ours.recall[1] < 0.95  # neither case is trivial
    expected = [theirs[key] for key in include]
    assert [ours.recall[1], ours.r_precision, ours.map_at_r] == pytest.approx(expected, rel=1e-12)


def test_lone_queries_are_misses():
    vectors = np.array([[0.0], [1], [5], [6]])
    scores = evaluate(vectors, np.array([4, 4, 9, -3]), recall_at=(1, 3), cluster=False)
    assert (scores.lone_queries, scores.recall) == (2, {1: 0.5, 3: 0.5})
    assert scores.r_precision == scores.map_at_r == 0.5
    assert evaluate(vectors, np.arange(4), cluster=False).recall[1] == 0


def test_vectors_without_labels_have_no_scores():
    with pytest.raises(ValueError, match=r"expected labels for all vectors, but 2 of 4 have none \(-1\)"):
        evaluate(np.arange(4.0)[:, None], np.array([0, -1, 0, -1]))


@pytest.mark.parametrize("with_gallery", [False, True])
def test_engines_and_block_sizes_agree(with_gallery):
    vectors, labels = random_case(images=60, dimensions=300)
    vectors[30:45] = vectors[:15]
    options = {"gallery": vectors[25:], "gallery_labels": labels[25:]} if with_gallery else {}
    scores = []
    for name in ("counting", "search"):
        with engine(name):
            for block in (None, 1, 15, 16, 30, 59, 500):  # even and odd numbers of blocks, one, and a rest
                scores += [evaluate(vectors, labels, recall_at=range(1, 20), cluster=False, block=block, **options)]
    assert all(score == scores[0] for score in scores)
    assert list(scores[0].recall.values()) == sorted(scores[0].recall.values())


def test_dtypes_give_equal_scores():
    vectors, labels = random_case()
    vectors = torch.from_numpy(vectors).bfloat16()  # exact in every type below
    expected = evaluate(vectors.double().numpy(), labels, cluster=False)
    read_only = np.broadcast_to(vectors.double().numpy(), vectors.shape)
    columns_first = np.asfortranarray(vectors.float().numpy()).astype(np.longdouble)
    for form in (vectors, vectors.float(), vectors.clone().requires_grad_(), read_only, columns_first):
        assert evaluate(form, torch.from_numpy(labels).int(), cluster=False) == expected
        assert evaluate(form, labels.astype(np.uint8), cluster=False) == expected


@pytest.mark.parametrize("name", ["counting", "search"])
def test_progress_is_reported(name):
    (vectors, labels), calls = random_case(images=10), []
    with engine(name):
        evaluate(vectors, labels, block=4, progress=lambda done, total: calls.append((done, total)))
    assert calls[:3] == [(4, 10), (8, 10), (10, 10)]
    assert calls[3:] == sorted(calls[3:])
    assert (calls[3], calls[-1]) == ((1, 250), (250, 250))  # 25 iterations of ten starts


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e100])
def test_nmi_of_separate_groups_equals_scikit_learn(scale):
    from sklearn.metrics import normalized_mutual_info_score

    generator = np.random.default_rng(0)
    group = generator.permutation(np.arange(120) % 4)
    vectors = (1e4 + 100 * np.eye(4)[group] + generator.normal(size=(120, 4))) * scale
    labels = np.array(LABELS)[np.where(generator.random(120) < 0.8, group, 3)]  # some labels disagree
    expected = normalized_mutual_info_score(group, labels, average_method="arithmetic")
    assert 0.3 < expected < 0.9
    assert nmi(vectors, labels)[0] == pytest.approx(expected, rel=1e-12)
    assert evaluate(vectors, group * 5 - 9).nmi == pytest.approx(1, rel=1e-12)


def test_nmi_iterations_equal_faiss():
    import faiss
    from sklearn.metrics import normalized_mutual_info_score

    vectors, labels = random_case(images=400, dimensions=5)
    points = vectors.astype(np.float64) - vectors.astype(np.float64).mean(0)
    points = (points / np.abs(points).max()).astype(np.float32)
    start, centers, runs = faiss.ClusteringInitialization(5, 7), np.empty((7, 5), np.float32), []
    start.method = faiss.ClusteringInitMethod_KMEANS_PLUS_PLUS
    for start.seed in range(30, 40):  # ten for every seed of ours
        start.init_centroids(400, faiss.swig_ptr(points), faiss.swig_ptr(centers))
        means = faiss.Kmeans(5, 7, niter=25, min_points_per_centroid=1, max_points_per_centroid=400, seed=3)
        means.train(points, init_centroids=centers)
        distances, nearest = means.index.search(points, 1)
        runs.append((distances.sum(), normalized_mutual_info_score(labels, nearest[:, 0])))
    assert len({value for _, value in runs}) > 1
    assert nmi(vectors, labels, seed=3)[0] == min(runs)[1]


def test_nmi_of_equal_vectors_is_zero():
    assert nmi(np.ones((6, 3)), np.array([0, 1, 2, 0, 1, 2]))[0] == 0


def test_nmi_of_vectors_that_hardly_differ():
    vectors = 1 + np.arange(600.0)[:, None] / 2**20
    assert nmi(vectors, np.arange(600))[0] == pytest.approx(1, rel=1e-12)


def test_nmi_with_many_classes_uses_one_start(capfd):
    vectors = np.arange(1001.0)[:, None] * [1, -1]
    value, start = nmi(vectors, np.arange(1001), seed=3)  # every point its own cluster
    assert (value, start) == (pytest.approx(1, rel=1e-12), "faiss, 25 iterations, best of 1 k-means++ start, seed 3")
    assert capfd.readouterr() == ("", "")


def test_nmi_is_reproducible(monkeypatch):
    vectors, labels = random_case(images=200)
    first = evaluate(vectors, labels, seed=5)
    assert first == evaluate(vectors, labels, seed=5)
    assert first.nmi_start == "faiss, 25 iterations, best of 10 k-means++ starts, seed 5"
    monkeypatch.setattr(clustering, "MANY_CLUSTERS", 6)
    assert nmi(vectors, labels, seed=5) == nmi(vectors, labels, seed=5)
    assert len({nmi(vectors, labels, seed=seed)[0] for seed in range(5)}) > 1


def test_scores_round_trip_through_json():
    vectors, labels = random_case()
    for scores in (evaluate(vectors, labels, recall_at=(1, 10)), evaluate(vectors, labels, cluster=False)):
        written = json.loads(json.dumps(scores.to_json(), allow_nan=False))
        assert (Scores.from_json(written), written["recall@1"]) == (scores, scores.recall[1])
    with pytest.raises(ValueError, match=r"\['accuracy', 'nmi'\] differ"):
        Scores.from_json({key: value for key, value in written.items() if key != "nmi"} | {"accuracy": 1.0})


SIX, ONES = np.arange(6.0).reshape(3, 2), np.ones(3, dtype=int)
INVALID = {
    r"vectors of shape \(2 or more, dimensions\).*float64 of shape \(2,\)": lambda: evaluate(SIX[0], ONES),
    r"2 or more.*shape \(1, 2\)": lambda: evaluate(SIX[:1], ONES[:1]),
    r"shape \(3, 0\)": lambda: evaluate(SIX[:, :0], ONES),
    "real numbers, got complex64": lambda: evaluate(torch.from_numpy(SIX).cfloat(), ONES),
    "finite vectors.*1 of 3 rows that are not, first row 1": lambda: evaluate(np.where(SIX == 3, np.nan, SIX), ONES),
    "1 of 3 rows that are not, first row 2": lambda: evaluate(np.where(SIX > 3, np.inf, SIX), ONES),
    "numbers above 1e-100.*got up to 5.0e-200": lambda: evaluate(SIX * 1e-200, ONES),
    r"labels of shape \(3,\).*int64 of shape \(2,\)": lambda: evaluate(SIX, ONES[:2]),
    "integers, got float64": lambda: evaluate(SIX, ONES.astype(float)),
    "integers, got float32": lambda: nmi(SIX, torch.ones(3)),
    r"from 1 in recall_at, got \(0, 1\)": lambda: evaluate(SIX, ONES, recall_at=(0, 1)),
    r"integers from 1.*\[1.5\]": lambda: evaluate(SIX, ONES, recall_at=[1.5]),
    r"seed from 0 to 2\*\*31 - 1, got 2147483648": lambda: evaluate(SIX, ONES, seed=2**31),
    r"seed from 0 to 2\*\*31 - 1, got -1": lambda: nmi(SIX, ONES, seed=-1),
    "block of 1 or more queries, got 0": lambda: evaluate(SIX, ONES, block=0),
    "got only one: pass both or neither": lambda: evaluate(SIX, ONES, gallery=SIX),
    "together.*pass both or neither": lambda: evaluate(SIX, ONES, gallery_labels=ONES),
    r"gallery.*1 or more, 2\).*\(3, 1\)": lambda: evaluate(SIX, ONES, gallery=SIX[:, :1], gallery_labels=ONES),
    r"gallery_labels of shape \(3,\)": lambda: evaluate(SIX, ONES, gallery=SIX, gallery_labels=ONES[:1]),
    "count from 1 to 2.*got 3": lambda: neighbors(SIX, count=3),
    "count from 1 to 3.*got 0": lambda: neighbors(SIX, SIX, count=0),
}


@pytest.mark.parametrize("message", INVALID)
def test_invalid_input_raises(message):
    with pytest.raises(ValueError, match=message):
        INVALID[message]()


@pytest.mark.parametrize("name", ["counting", "search"])
@pytest.mark.slow
def test_memory_stays_far_below_all_pairs(name):
    from torch.profiler import ProfilerActivity, profile

    generator = np.random.default_rng(0)
    vectors, labels = generator.normal(size=(2000, 20)), generator.permutation(np.arange(2000) // 4)
    with engine(name), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        evaluate(vectors, labels, recall_at=(1, 1000), cluster=False, block=100)
    events = [event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    assert max(changes) <= 8 * max(2000 * 22, 100 * (100 if name == "counting" else 2000))
    assert 0 < max(np.cumsum(changes)) < 8 * 2000 * 2000 / 2  # all pairs: 8 * 2000 * 2000
