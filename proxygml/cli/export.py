"""proxygml export."""

from pathlib import Path
from typing import Annotated

import tyro

from proxygml.display import output, show_progress


def export(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    data: Path | None = None,
) -> None:
    """Export the trained network of a run to a folder that works without proxygml and PyTorch.

    It contains the network as ONNX and a Python script that turns image files into vectors with numpy, Pillow and
    onnxruntime. The network is compared with PyTorch on test images of the run; an export that differs by more than
    0.0001 is discarded.

    Args:
        run: Folder of a trained run.
        out: The folder to write: new, empty, or an earlier export.
        data: Where the run's images are now, if they have moved.
    """
    from proxygml.export.write import export_run
    from proxygml.model import Model

    with show_progress() as progress:
        settings = export_run(Model(run).run, out, data=data, progress=progress)
    output.print(
        f"{out}: largest difference from PyTorch {settings['largest_difference']:.1e} on {settings['compared_with']}. "
        f"Usage: {out / 'README.md'}"
    )
