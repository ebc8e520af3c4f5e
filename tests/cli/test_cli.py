"""The command line, as processes and in process."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from proxygml.cli.main import main
from proxygml.cli.train import Settings
from proxygml.embeddings import Embeddings
from proxygml.paper import EXPERIMENTS
from proxygml.training.presets import PRESETS
from proxygml.training.recipe import Recipe
from proxygml.training.run import Run

SMALL = ["--classes", "10", "--epochs", "1", "--proxies-per-class", "2", "--ratio", "0.5", "--no-baselines"]


def run_command(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "proxygml", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def failure(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str]:
    """Exit code and the lines on stderr of a command that fails."""
    with pytest.raises(SystemExit) as caught:
        main([str(argument) for argument in arguments])
    return caught.value.code, capsys.readouterr().err.strip()


@pytest.mark.slow
def test_train_prints_scores_and_next_steps(tmp_path: Path) -> None:
    done = run_command("train", "glyphs", *SMALL[:-1], "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    for words in ("raw pixels", "untrained network", "trained with proxygml", "R@1", "MAP@R", "NMI"):
        assert words in done.stdout
    for picture in ("retrieval.png", "map.png", "curves.png"):
        assert str(tmp_path / "run" / picture) in done.stdout
    assert "What next:" in done.stdout
    assert "━" not in done.stderr  # no bars without a terminal
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.slow
def test_scores_as_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(["train", "glyphs", *SMALL, "--out", str(tmp_path / "run"), "--json"])
    assert json.loads(capsys.readouterr().out) == Run.open(tmp_path / "run").scores


@pytest.mark.slow
def test_default_folder_is_below_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main(["train", "glyphs", *SMALL])
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("glyphs-20")
    assert Run.open(folder).scores


def test_embed_then_evaluate(trained_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(["embed", str(trained_run.folder), "--out", str(tmp_path / "test.npz")])
    assert "of 128 dimensions in" in capsys.readouterr().out
    main(["evaluate", str(tmp_path / "test.npz"), "--json"])
    assert json.loads(capsys.readouterr().out) == trained_run.scores["trained"]
    main(["embed", str(trained_run.folder), "--out", str(tmp_path / "train.npz"), "--split", "train"])
    train, test = (Embeddings.load(tmp_path / f"{split}.npz") for split in ("train", "test"))
    assert not set(train.paths) & set(test.paths)


def test_evaluate_own_vectors(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
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


@pytest.mark.slow
def test_warning_is_one_line(tmp_path: Path) -> None:
    done = run_command("train", "glyphs", *SMALL, "--ratio", "0.01", "--out", tmp_path / "run")
    assert done.returncode == 0
    (line,) = [line for line in done.stderr.splitlines() if line.lower().startswith("warning")]
    assert line.startswith("warning: every link of a sample goes to its own class (links: 1, ")
    assert "use a ratio of at least" in line


@pytest.mark.slow
def test_recall_at_without_1(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    main(["train", "glyphs", *SMALL, "--held-out", "0.2", "--recall-at", "2", "4", "--out", str(tmp_path / "run")])
    assert "R@4" in capsys.readouterr().out


@pytest.mark.slow
def test_piped_table_is_not_cut(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", vectors=np.eye(50), labels=np.arange(50) % 2)
    done = run_command("evaluate", tmp_path / "a.npz", "--recall-at", *range(1, 30))
    assert "…" not in done.stdout
    assert "R@29" in done.stdout


def test_lone_image_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    np.savez(tmp_path / "a.npz", vectors=np.array([[0.0], [1], [10]]), labels=np.array([0, 0, 1]))
    main(["evaluate", str(tmp_path / "a.npz")])
    assert "1 query without an image of the same class to find: each counts as a miss" in capsys.readouterr().out


class TestMistakes:
    """Each is one line on stderr that says what to do; nothing is left behind."""

    def test_resume_of_no_run(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        code, line = failure(capsys, "train", "--resume", tmp_path / "nowhere")
        assert (code, line) == (1, f"error: no recipe.json in {tmp_path / 'nowhere'}: that is not the folder of a run")

    def test_folder_is_not_empty(self, trained_run: Run, capsys: pytest.CaptureFixture) -> None:
        code, lines = failure(capsys, "train", "glyphs", "--out", trained_run.folder)
        assert code == 1
        assert lines.splitlines()[-1].startswith(f"error: {trained_run.folder} is not empty: choose another --out")

    def test_missing_vectors(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
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
        assert "expected 2 to 611 classes, got 100000" in lines.splitlines()[-1]

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["--dataset", "folder"], "expected a folder of your images as --data"),
            (["--data", "/somewhere"], "glyphs are drawn and need no --data"),
            (["--backbone", "resnet9000"], "expected a backbone, got 'resnet9000': did you mean"),
            (["--image-size", "8"], "expected 16 pixels or more"),
            (["--held-out", "0.95", "--classes", "12"], "leaves 1 of 12 classes to train on"),
            (["--weights", "nowhere.pth"], "nowhere.pth"),
            (["--frozen", "block9"], "no stage block9 to freeze in ConvNet: choose from block1"),
            *([(["--device", "cuda"], "device cuda is not available")] if not torch.cuda.is_available() else []),
        ],
    )
    @pytest.mark.slow
    def test_impossible_settings_leave_no_folder(
        self, options: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture
    ) -> None:
        code, lines = failure(capsys, "train", "glyphs", *SMALL, *options, "--out", tmp_path / "run")
        assert code == 1
        assert words in lines.splitlines()[-1]
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            (["glyphs"], "--resume continues with the settings of the run: leave out glyphs"),
            (
                ["--out", "elsewhere"],
                "--resume continues a run in its own folder: leave out --out, --like and --minutes",
            ),
            (["--epochs", "1"], "expected at least as many epochs as are trained, 2, got 1"),
            (["--seed", "3"], "--resume cannot change seed from 0 to 3"),
            (["--data", "nowhere"], "are not in /nowhere: name their folder with --data"),
        ],
    )
    def test_resume_with_other_settings(
        self,
        options: list[str],
        words: str,
        trained_run: Run,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture,
    ) -> None:
        monkeypatch.chdir("/")
        before = trained_run.recipe
        code, line = failure(capsys, "train", *options, "--resume", trained_run.folder)
        assert code == 1
        assert words in line
        assert trained_run.recipe == before

    def test_resume_with_allowed_settings(
        self, trained_run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
    ) -> None:
        def resume(folder: Path, recipe: Recipe, **_: object) -> Run:
            assert (folder, recipe) == (trained_run.folder, trained_run.recipe.changed({"epochs": 20, "device": "cpu"}))
            return trained_run

        monkeypatch.setattr("proxygml.training.start.resume", resume)
        main(["train", f"--resume={trained_run.folder}", "--epochs", "20", "--device", "cpu"])
        assert "What next:" in capsys.readouterr().out

    def test_recipe_was_edited(self, trained_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        shutil.copytree(trained_run.folder, tmp_path / "run")
        edited = trained_run.recipe.changed({"embedding_dim": 64})
        (tmp_path / "run" / "recipe.json").write_text(edited.to_json())
        code, line = failure(capsys, "train", "--resume", tmp_path / "run")
        assert code == 1
        assert line.startswith(
            "error: --resume cannot change embedding_dim from 128 to 64: change it back, or train a new run"
        )

    @pytest.mark.slow
    def test_brackets_in_a_path(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        main(["train", "glyphs", *SMALL, "--out", str(tmp_path / "a[/x]")])
        shown = capsys.readouterr()
        assert str(tmp_path / "a[/x]") in shown.err
        assert str(tmp_path / "a[/x]" / "map.png") in shown.out

    def test_unexpected_error_is_one_line(
        self, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise KeyError("surprise")

        monkeypatch.setattr("proxygml.training.start.train", fail)
        code, lines = failure(capsys, "train", "glyphs", "--out", tmp_path / "run")
        assert code == 1
        assert lines.splitlines()[-1] == "error: KeyError: 'surprise' (PROXYGML_TRACEBACK=1 shows where)"
        monkeypatch.setenv("PROXYGML_TRACEBACK", "1")
        with pytest.raises(KeyError):
            main(["train", "glyphs", "--out", str(tmp_path / "run")])

    def test_run_without_weights(self, tmp_path: Path, tiny, capsys: pytest.CaptureFixture) -> None:
        run = Run.create(tmp_path / "run", tiny)
        code, line = failure(capsys, "embed", run.folder, "--out", tmp_path / "a.npz")
        assert code == 1
        assert "no model.safetensors" in line

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ("", "expected one of train, embed, evaluate, .*, doctor \\(proxygml --help\\)"),
            ("trian glyphs", "expected one of .*, got 'trian': did you mean 'train'\\? \\(proxygml --help\\)"),
            ("index biuld x", "expected one of .*: did you mean 'build'\\? \\(proxygml index --help\\)"),
            (
                "train photo",
                "expected one of glyphs, .*, got 'photo': did you mean 'photos'\\? \\(proxygml train --help\\)",
            ),
            ("train photos /tmp", "unexpected '/tmp': did you mean --data /tmp\\? \\(proxygml train photos --help\\)"),
            (
                "train glyphs --epoch 2",
                "no option --epoch: did you mean '--epochs'\\? \\(proxygml train glyphs --help\\)",
            ),
            ("train glyphs --epochs two", "Error parsing --epochs: .*'two' \\(proxygml train glyphs --help\\)"),
            ("train glyphs --classes none", "Error parsing --classes: expected \\{None\\}\\|INT, got 'none' .*"),
            ("train glyphs --ratio -1", "expected a ratio above 0 .*, got -1.0 \\(proxygml train glyphs --help\\)"),
            ("train glyphs --optimizer adm", "invalid choice 'adm' .*'adam', .*"),
            ("search idx photo.jpg", "unexpected 'photo.jpg': did you mean --image photo.jpg\\? .*"),
            ("index build --out i", "expected an .npz, a folder of images, .* \\(proxygml index build --help\\)"),
            ("embed", "Missing from proxygml embed: RUN\\|IMAGES --out PATH \\(proxygml embed --help\\)"),
        ],
    )
    def test_usage(self, arguments: str, said: str, capsys: pytest.CaptureFixture) -> None:
        code, line = failure(capsys, *arguments.split())
        assert code == 2
        assert re.fullmatch(f"error: {said}", line)


def test_help_says_each_default_once(capsys: pytest.CaptureFixture) -> None:
    for command in ("embed", "paper", "index build", "datasets"):
        with pytest.raises(SystemExit):
            main([*command.split(), "--help"])
        shown = capsys.readouterr().out
        assert "default: None" not in shown
        assert "{None}|PATH]" not in shown.splitlines()[0]


def test_help_lists_experiments(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["paper", "--help"])
    assert set(EXPERIMENTS) <= set(re.findall(r"[\w-]+", capsys.readouterr().out))


def test_help_groups_settings(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        main(["train", "glyphs", "--help"])
    groups = re.findall(r"^\W*(\w+) options\W*$", capsys.readouterr().out, flags=re.MULTILINE)
    assert groups == ["data", "network", "loss", "optimization", "evaluation", "hardware"]


def test_settings_of_a_recipe_make_it_again() -> None:
    for _, recipe in PRESETS.values():
        assert Settings.of(recipe).recipe == recipe


@pytest.mark.parametrize("command", ["losses", "losses --json", "train --help"])
def test_reader_that_leaves_is_no_error(command: str) -> None:
    shell = f"{sys.executable} -m proxygml {command} | true"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""


@pytest.mark.parametrize("closed", [">&-", "2>&- >&- <&-"])
def test_closed_streams_are_no_error(closed: str) -> None:
    shell = f"{sys.executable} -m proxygml losses {closed}"
    done = subprocess.run(shell, shell=True, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("command", [[], ["train"], ["train", "glyphs"], ["embed"], ["evaluate"]])
def test_help(command: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as caught:
        main([*command, "--help"])
    assert caught.value.code == 0
    assert len(capsys.readouterr().out) > 200


def test_version(capsys: pytest.CaptureFixture) -> None:
    from proxygml import __version__

    main(["--version"])
    assert capsys.readouterr().out == f"proxygml {__version__}\n"


class TestLosses:
    def test_list(self, capsys: pytest.CaptureFixture) -> None:
        main(["losses"])
        shown = capsys.readouterr().out
        for words in ("proxy-anchor", "Kim et al., CVPR 2020", "two streams", "three heads", "written here *"):
            assert words in shown
        assert "* damlrrm: a reconstruction" in shown
        main(["losses", "--json"])
        assert json.loads(capsys.readouterr().out)["ms"]["batches"] == "balanced"

    @pytest.mark.slow
    def test_settings_and_caveat(self, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
        settings = ["--loss", "damlrrm", "--loss-settings", "base=contrastive", "margin=0.5"]
        main(["train", "glyphs", *SMALL, *settings, "--out", str(tmp_path / "run")])
        assert "* damlrrm: a reconstruction" in capsys.readouterr().out
        assert "reconstruction" in Run.open(tmp_path / "run").scores["remark"]

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (
                ["glyphs", "--loss", "proxygm"],
                "expected a loss, got 'proxygm': did you mean 'proxygml'? (known: proxygml, ",
            ),
            (
                ["glyphs", *SMALL, "--loss", "ms", "--loss-settings", "bata=3"],
                "ms has no setting bata: it has alpha, beta",
            ),
            (["glyphs", "--loss", "ms", "--like", "nativ"], "expected --like fair or --like native, got nativ"),
            (["glyphs", "--loss", "ms", "--like", "native"], "--like native changes a preset of the paper"),
            (["--loss", "ms", "--like", "fair"], "--like fair changes a preset"),
            (["glyphs", *SMALL, "--loss", "ms", "--images-per-class", "40"], "two classes of 40 images each"),
        ],
    )
    def test_wrong_option_is_one_line(
        self, arguments: list[str], expected: str, capsys: pytest.CaptureFixture, tmp_path: Path
    ) -> None:
        code, message = failure(capsys, "train", *arguments, "--out", tmp_path / "run")
        assert code == 1
        assert expected in message
        assert not (tmp_path / "run").exists()

    def test_native_settings(
        self, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        recipes = []

        def stop(recipe: Recipe, folder: Path, **_: object) -> None:
            recipes.append(recipe)
            raise ValueError("that is enough")

        monkeypatch.setattr("proxygml.training.start.train", stop)
        for loss, given in [("ms", ["--loss-settings", "beta=50"]), ("hdc", ["--epochs", "3"])]:
            _, message = failure(capsys, "train", "paper-cub", f"--loss={loss}", "--like", "native", *given)
            assert ("native hdc: the last layers learn" in message) == (loss == "hdc")
        ms, hdc = recipes
        assert (ms.pooling, ms.batch_size, ms.loss_settings) == ("max", 80, ("beta=50",))
        assert (hdc.backbone, hdc.embedding_dim, hdc.epochs) == ("googlenet", 384, 3)


@pytest.mark.slow
def test_embed_skips_broken_images(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for number in range(8):
        for copy in range(3):
            path = tmp_path / "photos" / f"class{number}" / f"{copy}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 40), (30 * number, 40 * copy, 90)).save(path)
            if copy == 2:
                path.write_bytes(path.read_bytes()[:60])
    options = ["--dataset", "folder", "--data", tmp_path / "photos", "--epochs", 1, "--ratio", 1, "--no-baselines"]
    main([str(o) for o in ["train", "glyphs", *options, "--skip-broken", "--out", tmp_path / "run"]])
    trained = capsys.readouterr().err
    main(["embed", str(tmp_path / "run"), "--out", str(tmp_path / "vectors.npz")])
    said = re.findall(r"skipped.*: 4 of 12 images that cannot be read: (.*)", trained + capsys.readouterr().err)
    training, test, embedded = (sorted(names.split(", ")) for names in said)
    assert sorted(training + test) == [f"class{number}/2.png" for number in range(8)]
    assert embedded == test
    assert len(Embeddings.load(tmp_path / "vectors.npz").vectors) == 8
