"""proxygml doctor: a line for every check, exit code 1 if one failed, one line after Ctrl-C."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from proxygml.backbones import build_trunk
from proxygml.cli import doctor
from proxygml.cli.main import main
from proxygml.training import checks
from proxygml.training.run import Run
from proxygml.training.start import resume

COMMAND = [sys.executable, "-m", "proxygml", "doctor"]


def status_of(name: str, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Status and detail of one check."""
    (check,) = [check for check in checks.checks() if check[0] == name]
    monkeypatch.setattr(checks, "checks", lambda: [check])
    ((_, status, detail),) = checks.run_checks()
    return status, detail


@pytest.mark.slow
def test_report_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(checks, "SECONDS", 0.01)
    monkeypatch.setattr(checks, "devices", lambda: ["cpu"])
    main(["doctor", "--json"])
    findings = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert {finding["status"] for finding in findings.values()} <= {"ok", "not available"}
    assert findings["torch"]["detail"] == torch.__version__
    assert findings["training on cpu, 16-mixed"]["status"] == "not available"
    for check in ("training on cpu, bf16-mixed", "two processes on cpu", "resnet50 on cpu, 32-true"):
        assert findings[check]["status"] == "ok"


def test_failure_is_exit_code_1_with_a_remedy(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    def fail() -> str:
        raise RuntimeError("CUDA error:\nno kernel image")

    def need() -> str:
        raise checks.NotAvailableError("this needs two GPUs")

    monkeypatch.setattr(checks, "checks", lambda: [("a", fail, "update the driver"), ("b", need, ""), ("c", str, "")])
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    assert ended.value.code == 1
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "failed         a: RuntimeError: CUDA error: no kernel image: update the driver",
        "not available  b: this needs two GPUs",
        "ok             c: ",
    ]


def test_only_libraries_if_one_is_broken(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setitem(doctor.LIBRARIES, "no_such_library", "some-package")
    with pytest.raises(SystemExit):
        main(["doctor"])
    assert capsys.readouterr().out.splitlines()[-1].endswith("pip install --force-reinstall some-package")


def test_weights_are_verified(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    name = "weights of resnet18"
    with monkeypatch.context() as context:
        status, detail = status_of(name, context)
    assert status == "not available"
    assert "https://download.pytorch.org/models/resnet18-f37072fd.pth" in detail
    torch.save(build_trunk("resnet18").state_dict(), "resnet18-f37072fd.pth")  # random weights
    status, detail = status_of(name, monkeypatch)
    assert status == "failed"
    assert "announces SHA-256 f37072fd" in detail


@pytest.mark.parametrize("wrong", [[2.6, 2.0], [2.4, 2.4], [float("nan")] * 2], ids=["value", "no step", "NaN"])
def test_wrong_numbers_of_a_device_fail(wrong: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    losses = {"32-true": [2.4, 1.0], "bf16-mixed": wrong}
    monkeypatch.setattr(checks, "losses", lambda device, precision: losses[precision])
    status, detail = status_of("training on cpu, bf16-mixed", monkeypatch)
    assert status == "failed"
    assert detail.endswith("use --precision 32-true")


@pytest.mark.slow
def test_processes_that_train_otherwise_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def train_with_twice_the_gradient(*arguments: str) -> None:
        run = Run.open(Path(arguments[-1]))
        recipe = run.recipe.changed({"devices": 1, "learning_rate": 2 * run.recipe.learning_rate})
        (run.folder / "recipe.json").write_text(recipe.to_json())
        resume(run.folder)

    monkeypatch.setattr(checks, "run_command", train_with_twice_the_gradient)
    status, detail = status_of("two processes on cpu", monkeypatch)
    assert (status, detail.split(": ")[0]) == ("failed", "ArithmeticError")


def test_slower_side_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "start_training", lambda *_: (None, None, None))
    monkeypatch.setattr(checks, "images_per_second", lambda *_: 100.0)
    monkeypatch.setattr(checks.os, "cpu_count", lambda: 4)
    for speed, limit in ((30.0, "the network is the limit, with --workers 4"), (10.0, "the loader is the limit: 10")):
        monkeypatch.setattr(checks, "loader_speed", lambda speed=speed: speed)
        assert limit in checks.describe_speed("cpu", "32-true")


@pytest.mark.slow
def test_ctrl_c_is_one_line() -> None:
    process = subprocess.Popen(COMMAND, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if "16-mixed" in line:  # next, it starts another process
            break
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == "stopped\n"
    assert process.returncode == 130
