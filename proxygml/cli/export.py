"""proxygml export."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from proxygml.cli.display import output, show_progress


def export(
    run: Annotated[Path, tyro.conf.Positional],
    out: Path,
    format: Literal["onnx", "safetensors", "torch-export"] = "onnx",
) -> None:
    """Export the trained network of a run, with a JSON file that describes how to prepare images.

    The file is compared with PyTorch on test images of the run; one that differs by more than 0.0001 is discarded.
    `proxygml embed --model model.onnx` needs no torch.

    Args:
        run: Folder of a trained run.
        out: The file to write (.onnx, .safetensors or .pt2), or a folder for it.
        format: ONNX with its weights, the weights alone, or a program of torch.export.
    """
    from proxygml.export.write import export_run
    from proxygml.model import Model

    with show_progress() as progress:
        path, description = export_run(Model(run).run, out, format, progress=progress)
    output.print(
        f"{path}, described in {path.name}.json: largest difference from PyTorch {description.largest_difference:.1e} "
        f"on {description.compared_with}"
    )
