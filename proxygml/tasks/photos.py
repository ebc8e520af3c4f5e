"""The image files of embeddings, found by their paths."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np


def image_files(paths: np.ndarray, roots: Sequence[Path]) -> list[Path | None]:
    """The file of each path (M,), absolute or relative to the first root that has any; None where there is no file."""
    found: list[Path | None] = [None] * len(paths)
    for root in roots:
        files = [root.absolute() / str(path) for path in paths]
        found = [file if file.is_file() else None for file in files]
        if any(found):
            break
    return found
