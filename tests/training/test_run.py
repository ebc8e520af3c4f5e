"""The folder of a run and its checkpoints."""

import os
import re
import struct
import warnings
from pathlib import Path

import pytest
import torch

from proxygml import files
from proxygml.training.checkpoints import load_checkpoint
from proxygml.training.presets import GLYPHS
from proxygml.training.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "run", GLYPHS)


def state(number: int) -> dict:
    return {"epochs_done": number, "weights": torch.full((1000,), float(number)), "nested": {"names": ["a", "b"]}}


def test_a_run_remembers_its_recipe_and_log(run: Run) -> None:
    run.write_log([{"epoch": 1}, {"epoch": 2}])
    again = Run.open(run.folder)
    assert again.recipe == GLYPHS
    assert again.log == [{"epoch": 1}, {"epoch": 2}]


def test_folder_may_be_a_string(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert Run.create(folder, GLYPHS) == Run.open(folder) == Run(folder) == Run(tmp_path / "run")


def test_a_half_written_line_of_the_log_is_left_out(run: Run) -> None:
    (run.folder / "log.jsonl").write_text('{"epoch": 1}\n{"epo')
    assert run.log == [{"epoch": 1}]


def test_a_folder_with_something_in_it_is_not_overwritten(run: Run) -> None:
    assert Run.create(run.folder, GLYPHS) == run  # nothing was trained
    run.write_log([{"epoch": 1}])
    with pytest.raises(FileExistsError, match="is not empty: choose another --out, or continue with --resume"):
        Run.create(run.folder, GLYPHS)


def test_folder_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(FileExistsError, match="is not empty: choose another --out: its files are not those of a run"):
        Run.create(str(tmp_path), GLYPHS)
    with pytest.raises(FileExistsError, match=r"photo.jpg is a file: choose another --out"):
        Run.create(tmp_path / "photo.jpg", GLYPHS)


@pytest.mark.parametrize("name", ["log.jsonl", "scores.json", "model.safetensors", "last.pt"])
def test_pipe_does_not_hang(run: Run, name: str) -> None:
    os.mkfifo(run.folder / name)
    read = {"log.jsonl": lambda: run.log, "scores.json": lambda: run.scores, "model.safetensors": run.load_best}
    with pytest.raises(ValueError, match=rf"{name} is .*a pipe or device"):
        read.get(name, lambda: load_checkpoint(run.folder / name))()
    if name == "model.safetensors":
        with pytest.raises(ValueError, match="a pipe or device"):
            _ = run.model_id


def test_what_is_no_run_is_refused(tmp_path: Path, run: Run) -> None:
    with pytest.raises(FileNotFoundError, match=r"no recipe.json in .*nothing"):
        Run.open(tmp_path / "nothing")
    (run.folder / "recipe.json").write_text('{"epochs": "many"}')
    with pytest.raises(ValueError, match=r"recipe.json is not a recipe: expected epochs as int"):
        _ = run.recipe
    with pytest.raises(FileNotFoundError, match=r"no scores.json .*--resume"):
        _ = run.scores
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors .*--resume"):
        run.load_best()


def test_the_newest_checkpoint_comes_back(run: Run) -> None:
    assert run.load_last() is None
    run.save_last(state(1))
    run.save_last(state(2))
    loaded = run.load_last()
    assert loaded["epochs_done"] == 2
    torch.testing.assert_close(loaded["weights"], state(2)["weights"])
    assert loaded["nested"] == {"names": ["a", "b"]}


@pytest.mark.parametrize("place", [0, 0.02, 0.3, 0.5, 0.8, 0.999])
@pytest.mark.parametrize("damage", ["truncated", "altered"])
def test_damaged_checkpoint_falls_back(run: Run, place: float, damage: str) -> None:
    run.save_last(state(1))
    run.save_last(state(2))
    path = run.folder / "last.pt"
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    if damage == "truncated":
        content = content[:at]
    else:
        content[at : at + 40] = bytes(byte ^ 0x55 for byte in content[at : at + 40])
    path.write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether there is one depends on where the damage is
        loaded = run.load_last()
    # Damage may also fall on the padding between records, which holds nothing.
    assert loaded["weights"].equal(state(loaded["epochs_done"])["weights"])
    assert loaded["epochs_done"] == 1 or damage == "altered"


def test_an_altered_weight_is_noticed(run: Run) -> None:
    run.save_last(state(1))
    path = run.folder / "last.pt"
    content = path.read_bytes()
    one = struct.pack("<f", 1.0)
    path.write_bytes(content.replace(one * 1000, one * 999 + struct.pack("<f", 1.5)))
    assert path.read_bytes() != content
    with pytest.raises(ValueError, match=r"last.pt is damaged: .* is altered"):
        load_checkpoint(path)


def test_missing_checkpoint_falls_back(run: Run) -> None:
    """As after a kill between the two renames."""
    run.save_last(state(1))
    (run.folder / "last.pt").rename(run.folder / "previous.pt")
    assert run.load_last()["epochs_done"] == 1


def test_damaged_checkpoint_never_replaces_a_good_one(run: Run) -> None:
    for number in (1, 2):
        run.save_last(state(number))
    (run.folder / "last.pt").write_bytes(b"PK")
    with pytest.warns(UserWarning, match=r"last.pt is damaged"):
        run.load_last()
    run.save_last(state(2))
    assert load_checkpoint(run.folder / "previous.pt")["epochs_done"] == 1
    assert (run.folder / "damaged.pt").read_bytes() == b"PK"


def test_lack_of_memory_is_no_damage(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object, **__: object) -> None:
        raise MemoryError

    run.save_last(state(1))
    monkeypatch.setattr(torch, "load", load)
    with pytest.raises(MemoryError):
        run.load_last()
    assert (run.folder / "last.pt").exists()


def test_two_damaged_checkpoints_are_an_error(run: Run) -> None:
    run.save_last(state(1))
    run.save_last(state(2))
    for name in ("last.pt", "previous.pt"):
        (run.folder / name).write_bytes(b"PK")
    with pytest.raises(
        ValueError, match=r"previous.pt is damaged: .*: remove .*last.pt and .*previous.pt, then --resume"
    ):
        run.load_last()
    assert (run.folder / "last.pt").exists()


def test_a_damaged_first_checkpoint_lets_the_run_begin_again(run: Run) -> None:
    run.save_last(state(1))
    (run.folder / "last.pt").write_bytes(b"PK")
    with pytest.warns(UserWarning, match=r"last.pt is damaged.*starting the run again"):
        assert run.load_last() is None


def test_a_checkpoint_that_would_run_code_is_refused(run: Run) -> None:
    class Malicious:
        def __reduce__(self):
            return (print, ("pwned",))

    torch.save({"model": Malicious()}, run.folder / "last.pt")
    with pytest.raises(ValueError, match="contains more than weights"):
        load_checkpoint(run.folder / "last.pt")


def best(number: int) -> dict:
    weights = {"weight": torch.full((50,), float(number)), "bias": torch.zeros(2)}
    return {"model": weights, "loss": {}, "epoch": 1, "class_names": ["a", "b"]}


def test_a_flipped_bit_is_noticed_or_changes_nothing(run: Run) -> None:
    """A sample of them, most in the header."""
    run.save_best(best(1))
    path, mark = run.folder / "model.safetensors", run.model_id
    content = path.read_bytes()
    header = 8 + struct.unpack("<Q", content[:8])[0]
    places = [*range(0, 8 * header, 13), *range(8 * header, 8 * len(content), 199)]
    noticed = []
    for place in places:
        altered = bytearray(content)
        altered[place // 8] ^= 1 << place % 8
        path.write_bytes(altered)
        try:
            loaded = run.load_best()
        except ValueError as error:
            noticed.append(str(error))
            continue
        assert (loaded["epoch"], loaded["class_names"]) == (1, ["a", "b"])
        assert loaded["model"].keys() == best(1)["model"].keys()
        assert all(loaded["model"][name].equal(value) for name, value in best(1)["model"].items())
        assert run.model_id == mark
    assert len(noticed) > len(places) * 0.9
    for line in noticed:
        assert re.match(rf"{path} is damaged: .*: write it again with proxygml train --resume", line)


def test_hash_is_of_the_weights(run: Run) -> None:
    marks = []
    for number in (1, 1, 2):
        run.save_best(best(number))
        marks.append(run.model_id)
    assert marks[0] == marks[1] != marks[2]
    run.write_recipe(run.recipe.changed({"precision": "bf16-mixed"}))  # its vectors differ
    assert run.model_id == f"{marks[2]}-bf16-mixed"
    (run.folder / "model.safetensors").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"model.safetensors is damaged: .*: write it again with .* --resume"):
        _ = run.model_id


def test_an_altered_score_is_noticed(run: Run) -> None:
    run.write_scores({"trained": {"recall@1": 0.75}})
    assert run.scores["trained"] == {"recall@1": 0.75}
    path = run.folder / "scores.json"
    path.write_text(path.read_text().replace("0.75", "0.85"))
    with pytest.raises(ValueError, match=r"scores.json is damaged \(it was altered.*\): write it again with proxygml"):
        _ = run.scores
    path.write_text(path.read_text()[:20])
    with pytest.raises(ValueError, match=r"scores.json is damaged"):
        _ = run.scores


def test_folder_of_a_killed_process(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    for name in (".lock", ".recipe-abcdefgh.json", ".map-abcdefgh.png"):
        (tmp_path / "run" / name).touch()
    run = Run.create(tmp_path / "run", GLYPHS)
    run.clear()
    assert sorted(path.name for path in run.folder.iterdir()) == [".lock", "recipe.json"]


def test_folder_in_use_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LOCK_TIMEOUT", 0.0)
    run.write_log([{"epoch": 1}])
    with files.locked(run.folder), pytest.raises(ValueError, match=rf"process {os.getpid()} on .* is using"):
        Run.create(run.folder, GLYPHS)


def test_weights_survive_their_file(run: Run) -> None:
    run.save_best(best(1))
    weights = run.load_best()["model"]["weight"]
    (run.folder / "model.safetensors").write_bytes(b"")
    assert weights.sum() == 50
