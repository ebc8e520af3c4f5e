"""Install the wheel into an empty environment, run commands and the code blocks of the README.

`make smoke` runs it; the tests do not, because installing takes minutes. constraints.txt pins the requirements.
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
    """Exit with an error if the wheel does not work."""
    with tempfile.TemporaryDirectory() as folder:
        environment, work = Path(folder, "venv"), Path(folder, "work")
        work.mkdir()
        venv.create(environment, with_pip=True)
        programs = environment / ("Scripts" if os.name == "nt" else "bin")
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        variables["PROXYGML_CACHE"] = str(work / "cache")

        def run(title: str, *command: str | Path) -> str:
            start = time.perf_counter()
            result = subprocess.run(
                [programs / command[0], *command[1:]], cwd=work, env=variables, capture_output=True, text=True
            )
            if result.returncode:
                sys.exit(f"{title} failed:\n{result.stdout}{result.stderr}")
            print(f"{title}: {time.perf_counter() - start:.0f} s", flush=True)
            return result.stdout

        run(f"pip install {wheel.name}", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel)
        imported = run("import", "python", "-c", "import proxygml; print(proxygml.__file__, proxygml.__version__)")
        file, version = imported.split()
        if not Path(file).is_relative_to(environment) or version != wheel.name.split("-")[1]:
            sys.exit(f"expected the wheel's package in {environment}, got {imported}")
        if "train" not in run("proxygml --help", "proxygml", "--help"):
            sys.exit("proxygml --help does not list the command train")
        run("proxygml train glyphs", "proxygml", "train", "glyphs", *SMALL, "--out", "run")
        run("proxygml embed", "proxygml", "embed", "run", "--out", "vectors.npz")
        print(run("proxygml evaluate", "proxygml", "evaluate", "vectors.npz"), end="")
        for block in re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL):
            run(f"README, {block.count(chr(10))} lines of Python", "python", "-W", "error", "-c", block)


if __name__ == "__main__":
    (wheel,) = Path(sys.argv[1]).resolve().glob("proxygml-*.whl")
    smoke(wheel)
