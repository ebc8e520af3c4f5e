"""The command line, as processes and in process."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from proxygml.cli import main
from proxygml.embeddings import Embeddings
from proxygml.runs import Run

SMALL = ["--classes", "10", "--epochs", "1", "--proxies-per-class", "2", "--ratio", "0.5", "--no-baselines"]


def called(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "proxygml", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def failure(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str]:
    """Exit code and the lines on stderr of a command that fails."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code, capsys.readouterr().err.strip()


def test_training_shows_scores_pictures_and_what_to_do_next(tmp_path: Path) -> None:
    done = called("train", "glyphs", *SMALL[:-1], "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    for words in ("raw pixels", "untrained network", "trained with proxygml", "R@1", "MAP@R", "NMI"):
        assert words in done.stdout
    for picture in ("retrieval.png", "map.png", "curves.png"):
        assert str(tmp_path / "run" / picture) in done.stdout
    assert "What next:" in done.stdout
    assert "━" not in done.stderr  # no bars where no terminal watches
    assert "\x1b" not in done.stdout + done.stderr


def test_scores_come_as_json_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(["train", "glyphs", *SMALL, "--out", str(tmp_path / "run"), "--json"])
    assert json.loads(capsys.readouterr().out) == Run.open(tmp_path / "run").scores


def test_without_a_folder_the_run_lands_under_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["train", "glyphs", *SMALL])
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("glyphs-20")
    assert Run.open(folder).scores


def test_a_run_becomes_vectors_and_vectors_become_scores(
    trained_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    main(["embed", str(trained_run.folder), "--out", str(tmp_path / "test.npz")])
    assert "of 128 dimensions in" in capsys.readouterr().out
    main(["evaluate", str(tmp_path / "test.npz"), "--json"])
    assert json.loads(capsys.readouterr().out) == trained_run.scores["trained"]
    main(["embed", str(trained_run.folder), "--out", str(tmp_path / "train.npz"), "--split", "train"])
    train, test = (Embeddings.load(tmp_path / f"{split}.npz") for split in ("train", "test"))
    assert not set(train.paths) & set(test.paths)


def test_own_vectors_are_scored_alone_or_against_a_gallery(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    vectors = np.array([[0.0], [1], [10], [11]])
    np.savez(tmp_path / "a.npz", vectors=vectors, labels=np.array([0, 1, 0, 1]))
    np.savez(tmp_path / "b.npz", vectors=vectors + 0.1, labels=np.array([0, 1, 0, 1]))
    main(["evaluate", str(tmp_path / "a.npz"), "--recall-at", "1", "2", "3", "--json"])
    scores = json.loads(capsys.readouterr().out)
    assert [scores[f"recall@{n}"] for n in (1, 2, 3)] == [0, 0.5, 1]
    main(["evaluate", str(tmp_path / "a.npz"), "--gallery", str(tmp_path / "b.npz"), "--no-cluster"])
    shown = capsys.readouterr().out
    assert "100.0" in shown
    assert "a.npz" in shown


def test_a_lone_image_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    np.savez(tmp_path / "a.npz", vectors=np.array([[0.0], [1], [10]]), labels=np.array([0, 0, 1]))
    main(["evaluate", str(tmp_path / "a.npz")])
    assert "1 queries have no other image of their class: each counts as a miss" in capsys.readouterr().out


class TestMistakes:
    """Each is one line on stderr that says what to do; nothing is left behind."""

    def test_a_wrong_folder_to_resume(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        code, line = failure(capsys, "train", "--resume", tmp_path / "nowhere")
        assert (code, line) == (1, f"error: no recipe.json in {tmp_path / 'nowhere'}: that is not the folder of a run")

    def test_a_folder_that_is_taken(self, trained_run: Run, capsys: pytest.CaptureFixture) -> None:
        code, lines = failure(capsys, "train", "glyphs", "--out", trained_run.folder)
        assert code == 1
        assert lines.splitlines()[-1].startswith(f"error: {trained_run.folder} is not empty: choose another --out")

    def test_vectors_that_are_not_there(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        code, line = failure(capsys, "evaluate", tmp_path / "no.npz")
        assert code == 1
        assert line.startswith("error: ")
        assert "no.npz" in line

    def test_vectors_with_nan(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        np.savez(tmp_path / "a.npz", vectors=np.full((3, 2), np.nan), labels=np.arange(3))
        code, line = failure(capsys, "evaluate", tmp_path / "a.npz")
        assert code == 1
        assert "finite" in line
        assert len(line.splitlines()) == 1

    def test_too_many_classes(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        code, lines = failure(capsys, "train", "glyphs", "--classes", 100000, "--out", tmp_path / "run")
        assert code == 1
        assert "expected at most" in lines.splitlines()[-1]

    def test_a_run_that_has_no_weights_yet(self, tmp_path: Path, tiny, capsys: pytest.CaptureFixture) -> None:
        run = Run.create(tmp_path / "run", tiny)
        code, line = failure(capsys, "embed", run.folder, "--out", tmp_path / "a.npz")
        assert code == 1
        assert "no best.pt" in line

    @pytest.mark.parametrize(
        "arguments",
        [[], ["trian"], ["train", "glyphs", "--epoch", "2"], ["train", "glyphs", "--epochs", "two"], ["embed"]],
    )
    def test_usage(self, arguments: list[str], capsys: pytest.CaptureFixture) -> None:
        code, lines = failure(capsys, *arguments)
        assert code == 2
        assert "proxygml" in lines


@pytest.mark.parametrize("command", [[], ["train"], ["train", "glyphs"], ["embed"], ["evaluate"]])
def test_help_teaches_every_command(command: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    assert len(capsys.readouterr().out) > 200


def test_the_version_is_told(capsys: pytest.CaptureFixture) -> None:
    from proxygml import __version__

    main(["--version"])
    assert capsys.readouterr().out == f"proxygml {__version__}\n"
