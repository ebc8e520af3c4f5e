"""The map in two dimensions, and background jobs."""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from sklearn.decomposition import PCA

from proxygml.server import map as maps
from proxygml.server.jobs import CanceledError, Job, NotReadyError


def blobs(count: int = 90) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    labels = np.arange(count) % 3
    return (10 * np.eye(6)[labels] + rng.normal(size=(count, 6))).astype(np.float32), labels


def ignore(done: int, total: int) -> None:
    pass


def test_pca_equals_scikit_learn() -> None:
    vectors, _ = blobs()
    ours, theirs = maps.principal_components(vectors, 2), PCA(2).fit_transform(vectors)
    for axis in range(2):
        assert abs(np.corrcoef(ours[:, axis], theirs[:, axis])[0, 1]) == pytest.approx(1, abs=1e-3)


def test_map_of_a_line_and_of_equal_vectors() -> None:
    line = maps.draw("pca", np.arange(5, dtype=np.float32)[:, None], ignore)
    np.testing.assert_allclose(line[:, 0], [-1, -0.5, 0, 0.5, 1], atol=1e-6)
    for layout in ("pca", "tsne"):
        np.testing.assert_array_equal(maps.draw(layout, np.ones((9, 3), np.float32), ignore), 0)
        assert maps.draw(layout, np.eye(3, dtype=np.float32)[:1], ignore).shape == (1, 2)


def test_map_fills_the_square_and_keeps_its_shape() -> None:
    points = maps.scale_to_square(np.array([[0.0, 0], [10, 1], [5, 4]]))
    np.testing.assert_allclose(points, [[-1, -0.4], [1, -0.2], [0, 0.4]], atol=1e-6)


@pytest.mark.slow
def test_tsne_keeps_clusters_and_reports_progress() -> None:
    vectors, labels = blobs()
    progress = []
    points = maps.draw("tsne", vectors, lambda done, total: progress.append((done, total)))
    centers = np.stack([points[labels == c].mean(axis=0) for c in range(3)])  # (3, 2)
    nearest = ((points[:, None] - centers) ** 2).sum(axis=2).argmin(axis=1)
    np.testing.assert_array_equal(nearest, labels)
    assert progress[-1][1] == 1000
    assert progress == sorted(progress)


def test_points_beyond_the_limit_are_interpolated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(maps, "MAX_TSNE_POINTS", 60)
    vectors, labels = blobs()
    monkeypatch.setattr(maps, "run_in_process", lambda layout, some, report: some[:, :2])
    points = maps.draw("tsne", vectors, ignore)
    centers = np.stack([points[labels == c].mean(axis=0) for c in range(3)])
    np.testing.assert_array_equal(((points[:, None] - centers) ** 2).sum(axis=2).argmin(axis=1), labels)


def test_umap_is_used_if_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = (
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
    (tmp_path / "umap.py").write_text(fake)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    assert maps.layouts()["umap"] == ""
    vectors, progress = blobs()[0], []
    points = maps.draw("umap", vectors, lambda done, total: progress.append((done, total)))
    np.testing.assert_allclose(points, maps.draw("pca", vectors, ignore), atol=1e-5)
    assert (40, 100) in progress
    sys.modules.pop("umap", None)


def test_error_in_the_process_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"^ModuleNotFoundError: No module named 'umap'$"):
        maps.run_in_process("umap", blobs()[0], ignore)
    monkeypatch.setattr(maps, "LAYOUT_SCRIPT", "-cimport os; os.kill(os.getpid(), 9)")
    with pytest.raises(ValueError, match="ended with -9: too little memory"):
        maps.run_in_process("umap", blobs()[0], ignore)


def test_canceled_map_ends_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started, processes, popen = threading.Event(), [], subprocess.Popen

    def start(*arguments: object, **options: object) -> subprocess.Popen:
        processes.append(popen(*arguments, **options))
        started.set()
        return processes[0]

    monkeypatch.setattr(maps.subprocess, "Popen", start)
    monkeypatch.setattr(maps, "LAYOUT_SCRIPT", "-cimport time; time.sleep(600)")
    job = Job(lambda report: maps.run_in_process("tsne", blobs()[0], report))
    job.start()
    assert started.wait(20)
    assert processes[0].poll() is None
    job.cancel()
    job.wait()
    assert job.status()["state"] == "idle"
    assert processes[0].poll() == -9


def test_job_runs_once() -> None:
    ran = []
    job = Job(lambda report: ran.append(1) or report(3, 4) or "result")
    assert job.status() == {"state": "idle", "done": 0, "total": 0, "error": ""}
    job.start()
    job.wait()
    job.start()
    job.wait()
    assert (job.status()["state"], job.done, job.total, job.result, ran) == ("done", 3, 4, "result", [1])
    job.cancel()
    assert job.state == "done"


def test_failed_job_can_be_restarted() -> None:
    def work(report: object) -> None:
        raise ValueError("too\nbad")

    job = Job(work)
    for _ in range(2):
        job.start()
        job.wait()
        assert job.status()["error"] == "too bad"
        assert job.state == "failed"


def test_canceled_job_ends_at_its_next_report() -> None:
    started, go_on, canceled = threading.Event(), threading.Event(), []

    def work(report: object) -> str:
        started.set()
        go_on.wait(20)
        try:
            report(1, 2)
        except CanceledError:
            canceled.append(True)
            raise
        return "done"

    job = Job(work)
    job.start()
    started.wait(20)
    job.cancel()
    go_on.set()
    job.wait()
    assert (canceled, job.state) == ([True], "idle")
    with pytest.raises(NotReadyError):
        assert job.result
    job.start()
    job.wait()
    assert job.result == "done"
