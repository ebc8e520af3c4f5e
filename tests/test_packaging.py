"""The sdist and the wheel contain the right files and the same version."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import proxygml

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tracked() -> set[str]:
    """The files that git tracks."""
    result = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if result.returncode or not result.stdout:
        pytest.skip("not a git checkout")
    return {name for name in result.stdout.split("\0") if name and (ROOT / name).exists()}


@pytest.fixture(scope="module")
def built(tracked: set[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel, built from a copy because building leaves files behind."""
    pytest.importorskip("build", reason="build is not installed: pip install build")
    copy, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in tracked:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, copy]
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def test_sdist_contains_the_repository(built: Path, tracked: set[str]) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert tracked <= {name.partition("/")[2] for name in archive.getnames()}


def test_wheel_contains_the_package_only(built: Path, tracked: set[str]) -> None:
    (wheel,) = built.glob("*.whl")
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert files == {name for name in tracked if name.startswith("proxygml/")}
    assert {"proxygml/py.typed", "proxygml/server/page.html"} <= files


def test_versions_agree(built: Path) -> None:
    names = [f"proxygml-{proxygml.__version__}-py3-none-any.whl", f"proxygml-{proxygml.__version__}.tar.gz"]
    assert sorted(path.name for path in built.iterdir()) == names
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == proxygml.__version__
    assert (ROOT / "CHANGELOG.md").read_text().split("## ")[1].startswith(proxygml.__version__)
