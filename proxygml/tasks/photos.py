"""The image files of embeddings, found by their paths."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np


def image_files(paths: np.ndarray, roots: Sequence[Path], *, confined: bool) -> list[Path | None]:
    """The file of each path (M,) below the first root that has any of them; None where there is no file.

    If confined, as for an .npz that someone may have sent, a file outside the root, also by a link, is none.
    """

    def locate(root: Path, path: str) -> Path | None:
        file = root.absolute() / path
        inside = not confined or file.resolve().is_relative_to(root.resolve())
        return file if inside and file.is_file() else None

    found: list[Path | None] = [None] * len(paths)
    for root in roots:
        found = [locate(root, str(path)) for path in paths]
        if any(found):
            break
    return found
