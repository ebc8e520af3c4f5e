"""proxygml export."""

from pathlib import Path
from typing import Annotated

import tyro

from proxygml.cli.display import beside, show_next
from proxygml.display import counted, output, show_progress


def export(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")],
    onnx: bool = False,
    license: str | None = None,
    data: Path | None = None,
) -> None:
    """Export the trained network of a run to a folder that works anywhere.

    It contains weights, preprocessing, recipe, scores, pictures and a model card; `proxygml.load("FOLDER")` opens it,
    and so do commands that take a run to embed images. With --onnx, it also works without proxygml and PyTorch.

    Args:
        run: Folder of a trained run, or an exported model.
        out: The folder to write: new, empty, or an earlier export.
        onnx: Add the network as ONNX, with a script that turns image files into vectors with numpy, Pillow and
            onnxruntime. It is compared with PyTorch on test images of the run; a network that differs by more than
            0.0001 is discarded.
        license: License of the weights, for the model card, such as mit.
        data: Where the run's images are now, if they have moved.
    """
    from proxygml.model import Model

    with show_progress() as progress:
        model = Model(run, data=data, device="cpu")
        settings = model.export(out, onnx=onnx, license=license, progress=progress)
    if onnx:
        difference, compared_with = settings["largest_difference"], settings["compared_with"]
        output.print(f"largest difference between ONNX and PyTorch {difference:.1e} on {compared_with}")
    output.print(f"model of {counted(settings['embedding_dim'], 'dimension')} in {out}: see {out / 'README.md'}")
    images = model.recipe.data if model.recipe.dataset == "folder" else None
    if images is not None and Path(images).is_dir():
        words = ["index", "build", images, "--out", beside(out, "index"), "--run", out]
        show_next((words, "photos embedded with it, to search in"))
