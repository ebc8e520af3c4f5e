"""The space in two dimensions, and work that goes on in the background."""

import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from sklearn.decomposition import PCA

from proxygml.server import map as maps
from proxygml.server.jobs import CanceledError, Job


def blobs(count: int = 90) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = np.arange(count) % 3
    return (10 * np.eye(6)[labels] + random.normal(size=(count, 6))).astype(np.float32), labels


def nobody(done: int, total: int) -> None:
    pass


def test_main_directions_are_those_of_scikit_learn() -> None:
    vectors, _ = blobs()
    ours, theirs = maps.main_directions(vectors, 2), PCA(2).fit_transform(vectors)
    for axis in range(2):
        assert abs(np.corrcoef(ours[:, axis], theirs[:, axis])[0, 1]) == pytest.approx(1, abs=1e-3)


def test_a_line_and_equal_vectors_are_drawn_too() -> None:
    line = maps.draw("pca", np.arange(5, dtype=np.float32)[:, None], nobody)
    np.testing.assert_allclose(line[:, 0], [-1, -0.5, 0, 0.5, 1], atol=1e-6)
    for layout in ("pca", "tsne"):
        np.testing.assert_array_equal(maps.draw(layout, np.ones((9, 3), np.float32), nobody), 0)
        assert maps.draw(layout, np.eye(3, dtype=np.float32)[:1], nobody).shape == (1, 2)


def test_a_map_fills_the_square_and_keeps_its_shape() -> None:
    points = maps.fitted(np.array([[0.0, 0], [10, 1], [5, 4]]))
    np.testing.assert_allclose(points, [[-1, -0.4], [1, -0.2], [0, 0.4]], atol=1e-6)


def test_tsne_keeps_what_is_near_together_and_tells_how_far_it_is() -> None:
    vectors, labels = blobs()
    told = []
    points = maps.draw("tsne", vectors, lambda done, total: told.append((done, total)))
    centers = np.stack([points[labels == c].mean(axis=0) for c in range(3)])  # (3, 2)
    nearest = ((points[:, None] - centers) ** 2).sum(axis=2).argmin(axis=1)
    np.testing.assert_array_equal(nearest, labels)
    assert told[-1][1] == 1000
    assert any(0 < done < 1000 for done, _ in told)


def test_points_beyond_the_most_are_placed_beside_their_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "MOST_FOR_TSNE", 60)
    vectors, labels = blobs()
    monkeypatch.setattr(maps, "in_another_process", lambda layout, some, report: some[:, :2])
    points = maps.draw("tsne", vectors, nobody)
    centers = np.stack([points[labels == c].mean(axis=0) for c in range(3)])
    np.testing.assert_array_equal(((points[:, None] - centers) ** 2).sum(axis=2).argmin(axis=1), labels)


def test_umap_is_offered_where_it_is_installed_and_is_called_with_the_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = (
        "import sys\n"
        "class UMAP:\n"
        "    def __init__(self, *, n_neighbors, random_state, n_jobs, verbose):\n"
        "        assert n_neighbors == 15 and verbose\n"
        "    def fit_transform(self, vectors):\n"
        "        print('Epochs completed:  40%| ####', file=sys.stderr)\n"
        "        return vectors[:, :2] * 2\n"
    )
    monkeypatch.setattr(maps.importlib.util, "find_spec", lambda name: None)
    assert maps.layouts()["umap"] == "pip install umap-learn"
    monkeypatch.undo()
    (tmp_path / "umap.py").write_text(stand_in)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert maps.layouts()["umap"] == ""
    vectors, told = blobs()[0], []
    points = maps.draw("umap", vectors, lambda done, total: told.append((done, total)))
    np.testing.assert_allclose(points, maps.draw("pca", vectors, nobody), atol=1e-5)
    assert (40, 100) in told
    sys.modules.pop("umap", None)


def test_what_fails_in_the_other_process_is_told_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"ValueError: .*NaN"):
        maps.in_another_process("tsne", np.full((9, 3), np.nan, np.float32), nobody)


def test_a_map_that_nobody_wants_ends_its_process() -> None:
    import multiprocessing

    started = threading.Event()

    def work(report: object) -> np.ndarray:
        started.set()
        return maps.in_another_process("tsne", np.random.default_rng(0).normal(size=(5000, 20)), report)

    job = Job(work)
    job.start()
    started.wait(20)
    job.cancel()
    job.wait()
    assert job.told()["state"] == "idle"
    assert multiprocessing.active_children() == []


def test_a_job_runs_once_and_keeps_its_result() -> None:
    ran = []
    job = Job(lambda report: ran.append(1) or report(3, 4) or "result")
    assert job.told() == {"state": "idle", "done": 0, "total": 0, "error": ""}
    job.start()
    job.wait()
    job.start()
    job.wait()
    assert (job.told()["state"], job.done, job.total, job.result, ran) == ("done", 3, 4, "result", [1])
    job.cancel()
    assert job.state == "done"


def test_a_job_that_fails_says_why_in_one_line_and_may_begin_again() -> None:
    def work(report: object) -> None:
        raise ValueError("too\nbad")

    job = Job(work)
    for _ in range(2):
        job.start()
        job.wait()
        assert job.told()["error"] == "too bad"
        assert job.state == "failed"


def test_a_canceled_job_ends_at_its_next_report_and_may_begin_again() -> None:
    reached, go_on, seen = threading.Event(), threading.Event(), []

    def work(report: object) -> str:
        reached.set()
        go_on.wait(20)
        try:
            report(1, 2)
        except CanceledError:
            seen.append("canceled")
            raise
        return "done"

    job = Job(work)
    job.start()
    reached.wait(20)
    job.cancel()
    go_on.set()
    job.wait()
    assert (seen, job.state, job.result) == (["canceled"], "idle", None)
    job.start()
    job.wait()
    assert job.result == "done"
