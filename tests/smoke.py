"""The wheel in an empty environment: installed, asked for help, trained with, and the blocks of the README run.

`make smoke` calls it; the tests do not, since installing takes minutes. What is installed is the wheel and what it
requires, pinned by constraints.txt, and nothing of this environment or folder.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMALL = ("--classes", "10", "--epochs", "1", "--proxies-per-class", "2", "--ratio", "0.5", "--held-out", "0.2")


def smoke(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        empty, work = Path(folder, "venv"), Path(folder, "work")
        work.mkdir()
        venv.create(empty, with_pip=True)
        programs = empty / ("Scripts" if os.name == "nt" else "bin")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment["PROXYGML_CACHE"] = str(work / "cache")

        def run(title: str, *command: str | Path) -> str:
            began = time.perf_counter()
            done = subprocess.run(
                [programs / command[0], *command[1:]], cwd=work, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(f"{title} failed:\n{done.stdout}{done.stderr}")
            print(f"{title}: {time.perf_counter() - began:.0f} s", flush=True)
            return done.stdout

        constraints = ROOT / "constraints.txt"
        run(f"pip install {wheel.name}", "pip", "install", "--quiet", "--constraint", constraints, wheel)
        where = run(
            "import proxygml", "python", "-c", "import proxygml; print(proxygml.__file__, proxygml.__version__)"
        )
        file, version = where.split()
        if not Path(file).is_relative_to(empty) or version != wheel.name.split("-")[1]:
            sys.exit(f"expected the wheel's package in {empty}, got {where}")
        if "train" not in run("proxygml --help", "proxygml", "--help"):
            sys.exit("proxygml --help does not name the command train")
        run("proxygml train glyphs", "proxygml", "train", "glyphs", *SMALL, "--out", "run")
        run("proxygml embed", "proxygml", "embed", "run", "--out", "vectors.npz")
        print(run("proxygml evaluate", "proxygml", "evaluate", "vectors.npz"), end="")
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL):
            run(f"README, {block.count(chr(10))} lines of Python", "python", "-W", "error", "-c", block)


if __name__ == "__main__":
    (found,) = Path(sys.argv[1]).resolve().glob("proxygml-*.whl")
    smoke(found)
