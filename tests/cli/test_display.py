"""Names of files and classes on a terminal: printed literally, never obeyed."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.table import Table

from proxygml.cli.display import show_run
from proxygml.cli.search import search, show_hits
from proxygml.display import (
    PlainConsole,
    counted,
    escape_control,
    in_one_line,
    messages,
    output,
    show_progress,
    show_scores,
)
from proxygml.embeddings import Embeddings
from proxygml.retrieval import Hit
from proxygml.training.presets import PHOTOS

HOSTILE = "[red]a[/red]:smile:\x1b[2J\x07\x9b31m\u202egpj.exe"
SHOWN = "[red]a[/red]:smile:\\x1b[2J\\x07\\x9b31m\\u202egpj.exe"


def test_control_characters_are_escaped() -> None:
    assert escape_control(HOSTILE) == SHOWN
    assert escape_control("a name that is no text: \udcff") == "a name that is no text: \\udcff"
    kept = "caf\u00e9 \u732b \u05d0\u05d1 \U0001f469\u200d\U0001f52c\nnext\tline"
    assert escape_control(kept) == kept


def test_line_breaks_in_names_are_escaped() -> None:
    assert in_one_line("a.jpg\nall is there\tand") == "a.jpg\\nall is there\\tand"


def test_console_prints_literally(capsys: pytest.CaptureFixture[str]) -> None:
    console = PlainConsole(width=200)
    console.print(HOSTILE)
    table = Table(box=None, pad_edge=False)
    table.add_column(HOSTILE)
    table.add_column("end")
    table.add_row(HOSTILE, "whole")
    console.print(table)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == SHOWN
    assert lines[1].split() == [SHOWN, "end"]
    assert lines[2].split() == [SHOWN, "whole"]


def test_hits_are_printed_literally(capsys: pytest.CaptureFixture[str]) -> None:
    show_hits([HOSTILE], [[Hit(HOSTILE, "[bold]" + HOSTILE, 0.5, 0.9, 1), Hit("b\nc", "d", 1.0, 0.5, 2)]])
    shown = capsys.readouterr().out
    assert shown.count(SHOWN) == 3
    assert "[bold]" in shown
    assert "b\\nc" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("password", ["secret", "a:b", "a@b", "a/b", "a?b", "a#b", "a b", "12345"])
def test_passwords_are_not_printed(password: str, capsys: pytest.CaptureFixture[str]) -> None:
    output.print(f"postgresql://anna:{password}@host:5433/b is closed")
    output.print(f"no run in postgres:/anna:{password}@[::1]/b")  # as a path
    output.print(f"postgres://host?user=anna&password={password.replace(' ', '+')}&a=b")
    assert capsys.readouterr().out.splitlines() == [
        "postgresql://anna@host:5433/b is closed",
        "no run in postgres:/anna@[::1]/b",
        "postgres://host?user=anna&password=...&a=b",
    ]


@pytest.mark.parametrize("text", ["postgresql://host:5433/birds has no crow@2.jpg", "postgres://h:5432 at noon@home"])
def test_ports_are_printed(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    output.print(text)
    assert capsys.readouterr().out.strip() == text


def test_json_is_ascii(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = Embeddings(np.eye(2), np.arange(2), np.array([HOSTILE, "b"]), np.array([HOSTILE, "c"]))
    rows.save(tmp_path / "rows.npz")
    search(str(tmp_path / "rows.npz"), vectors=tmp_path / "rows.npz", count=1, json=True)
    shown = capsys.readouterr().out
    assert shown.isascii()
    assert "\x1b" not in shown
    assert json.loads(shown)[0]["hits"][0]["path"] == HOSTILE


def test_progress_is_printed_literally(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = io.StringIO()
    monkeypatch.setattr(messages, "_file", drawn)  # `file` would stay what it is now
    monkeypatch.setattr(messages, "_force_terminal", True)
    monkeypatch.setattr(messages, "_width", 300)
    with show_progress() as progress:
        progress("[red]working", 1, 2, HOSTILE)
        progress("skipped", 0, 0, HOSTILE)
    assert drawn.getvalue().count(SHOWN) >= 2
    assert "[red]working" in drawn.getvalue()
    assert "\x1b[2J\x07" not in drawn.getvalue()


def scores(recall: float, *, images: int = 300, classes: int = 15, lone: int = 0) -> dict:
    rest = {"map_at_r": recall, "r_precision": recall, "nmi": None, "lone_queries": lone}
    return {"recall@1": recall, **rest, "images": images, "classes": classes}


def shown_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, **changes: object) -> str:
    run = {"untrained": scores(0.851), "trained": scores(0.824), "best_epoch": 6, "epoch_chosen_by": None}
    run["gain"] = [-0.027, -0.05, -0.004]
    show_run(tmp_path, PHOTOS.changed({"epochs": 6}), run | {"seconds": 9.0} | changes)
    return capsys.readouterr().out


def test_training_that_did_not_help_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shown = shown_run(capsys, tmp_path)
    header, frozen, trained, said, advice = (line.split() for line in shown.splitlines()[:5])
    assert header[-5:] == ["R@1", "vs.", "frozen", "(95", "%)"]
    assert frozen[-1] == "-"  # of NMI
    assert trained[-4:] == ["-2.7", "(-5.0", "to", "-0.4)"]
    assert " ".join(said).endswith("epoch 6 of 6 (the last), 9 s of training")
    assert " ".join(advice).startswith("Training did not help: the frozen backbone is no worse. Try --learning-rate")
    uncertain = shown_run(capsys, tmp_path, trained=scores(0.855), gain=[0.004, -0.002, 0.009])
    assert "The gain over the frozen backbone may be chance: its interval includes 0. Try --learning-rate" in uncertain
    assert "did not help" not in shown_run(capsys, tmp_path, trained=scores(0.9), gain=[0.049, 0.03, 0.07])


def test_a_test_that_cannot_show_a_gain_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for recall, lone, line in [
        (1.0, 0, "R@1 has nothing to gain: that of the frozen backbone"),
        (0.0, 300, "Nothing to find: each"),
    ]:
        rows = {name: scores(recall, lone=lone) for name in ("untrained", "trained")}
        shown = shown_run(capsys, tmp_path, **rows, gain=[0.0, 0.0, 0.0])
        assert line in shown
        assert "did not help" not in shown


def test_next_steps_with_own_images(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    recipe = PHOTOS.changed({"dataset": "my_data:Birds"})
    for results, split in ({}, "train"), ({"trained": scores(0.9), "seconds": 9.0, "best_epoch": 0}, "test"):
        show_run(tmp_path, recipe, {"epoch_chosen_by": None} | results)
        index = f"{tmp_path}-index"
        build = f"index build --run {tmp_path} --dataset my_data:Birds --split {split} --out {index}  #"
        shown = capsys.readouterr().out
        assert build in shown
        assert f"browse {index}  #" in shown


def test_last_epoch_is_shown_beside_the_best(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    best = {"last_epoch": scores(0.9), "trained": scores(0.95), "best_epoch": 4, "epoch_chosen_by": "held_out"}
    shown = shown_run(capsys, tmp_path, **best)
    assert "the same, last epoch" in shown
    assert "epoch 4 of 6 (the last that is better than before training on held-out classes)" in shown


@pytest.mark.parametrize(("images", "classes", "cautious"), [(12, 2, True), (99, 10, True), (100, 10, False)])
def test_small_test_has_a_caution(
    images: int, classes: int, cautious: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    show_scores({"trained": scores(1.0, images=images, classes=classes)}, heading="%")
    said = f"caution: scores on {images} images of {classes} classes say little; one image is {100 / images:.1f} points"
    assert (said in capsys.readouterr().out) == cautious


def test_a_test_on_one_class_has_a_caution(capsys: pytest.CaptureFixture[str]) -> None:
    show_scores({"trained": scores(1.0, images=12, classes=1)}, heading="%")
    assert "caution: all images are of one class, so that every neighbor is right" in capsys.readouterr().out


def test_both_consoles_are_plain() -> None:
    assert {type(output), type(messages)} == {PlainConsole}


def test_counted_nouns() -> None:
    nouns = ["image", "class", "query", "index", "near-duplicate"]
    assert [counted(1, noun) for noun in nouns[:2]] == ["1 image", "1 class"]
    expected = ["0 images", "2 classes", "3 queries", "4 indexes", "1,000 near-duplicates"]
    assert [counted(number, noun) for number, noun in zip((0, 2, 3, 4, 1000), nouns, strict=True)] == expected
