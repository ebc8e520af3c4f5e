"""What strangers install: the wheel, the sdist, and the version that each of them names."""

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


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], Path]:
    """What git holds, and a copy of it in which to build, since building leaves things behind."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode or not done.stdout:
        pytest.skip("git does not know which files belong here")
    names = {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}
    copy = tmp_path_factory.mktemp("tree")
    for name in names:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    return names, copy


@pytest.fixture(scope="module")
def built(tracked: tuple[set[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that was built from it."""
    pytest.importorskip("build", reason="build is not installed: pip install build")
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tracked[1]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_the_sdist_holds_every_file_of_the_repository(built: Path, tracked: tuple[set[str], Path]) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert not tracked[0] - held


def test_the_wheel_of_the_sdist_holds_the_package_and_nothing_else(built: Path, tracked: tuple[set[str], Path]) -> None:
    (wheel,) = built.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == {name for name in tracked[0] if name.startswith("proxygml/")}
    assert {"proxygml/py.typed", "proxygml/browser/page.html"} <= held


def test_everything_names_the_same_version(built: Path) -> None:
    names = [f"proxygml-{proxygml.__version__}-py3-none-any.whl", f"proxygml-{proxygml.__version__}.tar.gz"]
    assert sorted(path.name for path in built.iterdir()) == names
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == proxygml.__version__
    assert (ROOT / "CHANGELOG.md").read_text().split("## ")[1].startswith(proxygml.__version__)


def test_the_citation_has_what_its_format_requires() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    paper = citation["preferred-citation"]
    assert {"type", "title", "authors"} <= paper.keys()
    assert paper["title"] in (ROOT / "docs" / "paper.md").read_text()
    assert [author["family-names"] for author in paper["authors"]] == ["Zhu", "Yang", "Deng", "Liu"]
