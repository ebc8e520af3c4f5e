"""Commands that are stopped in every way, as real processes."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from proxygml.cli import main
from proxygml.paper import running
from proxygml.paper.executors import Executor
from proxygml.paper.settings import SETTINGS

pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
def test_stopped_command_ends_its_processes_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def press_ctrl_c(process: subprocess.Popen) -> None:
        os.killpg(process.pid, signal.SIGINT)  # to all of its processes, as a terminal does

    monkeypatch.chdir(tmp_path)
    arguments = ["paper", "grid", "--quick", "--jobs", "1"]
    kept: list[dict] = []
    for stop in (subprocess.Popen.terminate, subprocess.Popen.kill, press_ctrl_c):
        command = [sys.executable, "-m", "proxygml", *arguments]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        while len(running.load_runs(Path("runs/quick/grid/glyphs.json"))) == len(kept):
            assert process.poll() is None
            time.sleep(0.1)
        if not kept:
            main.main([*arguments, "--render"])
            with pytest.raises(SystemExit):
                main.main(arguments)
            refusal = "is using runs/quick: wait for it, or stop it\n"
            assert capsys.readouterr().err == f"error: process {process.pid} on {socket.gethostname()} {refusal}"
        stop(process)
        _, said = process.communicate(timeout=60)  # until every process that holds the pipe has ended
        if stop is subprocess.Popen.kill:
            assert process.returncode == -signal.SIGKILL
        else:
            assert (process.returncode, said) == (130, "stopped: the same command goes on\n")
        earlier, kept = kept, running.load_runs(Path("runs/quick/grid/glyphs.json"))
        assert kept[: len(earlier)] == earlier  # with their times: they were not made again


def test_where_a_result_cannot_be_kept_nothing_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, runs: list[dict]) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("proxygml.paper.results.save_runs", full)
    small = {"classes": 8, "epochs": 1, "embedding_dim": 8, "ratio": 0.5}
    recipe = SETTINGS["glyphs"].recipe.changed({**small, "held_out": 0.0, "tested_epochs": (1,), "test": False})
    where = {"results": tmp_path, "work": tmp_path / "work", "executor": Executor(jobs=1), "progress": lambda *_: None}
    with pytest.raises(OSError, match="no space left") as caught:  # and kept, with all its frames, as by the command
        running.run_missing("modules", "glyphs", running.jobs_of({"8 all three": recipe}, range(3)), **where)
    assert not multiprocessing.active_children(), caught.value
