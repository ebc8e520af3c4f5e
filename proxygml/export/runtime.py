"""Exported networks without torch: the description (model.onnx.json) and the ONNX runtime."""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

import numpy as np

from proxygml.data import ImageList
from proxygml.data.images import Crops
from proxygml.embeddings import Embeddings
from proxygml.files import one_line, parse_json
from proxygml.optional import library
from proxygml.training.recipe import Recipe
from proxygml.version import __version__

if TYPE_CHECKING:
    import onnxruntime

VERSION = 1  # of the description's format
INPUT, OUTPUT = "images", "embeddings"
PREPARATION = (
    "rotate the image upright according to its EXIF orientation",
    "convert it to 8-bit RGB, with transparency on white",
    "crop the center square with a side of crop_fraction times the shorter side",
    "resize it to image_size x image_size: bilinear with antialiasing (Pillow's BILINEAR)",
    "pass it as uint8, channels first; the network itself normalizes and orders the channels",
)


@dataclass(frozen=True)
class Description:
    """The JSON next to an exported network: its file, its input and output, and the run it comes from."""

    format: str  # onnx, safetensors or torch-export
    sha256: str  # of the file
    model: str  # `Run.model_id`
    image_size: int
    crop_fraction: float
    embedding_dim: int
    unit_length: bool
    compared_with: str  # the images of the comparison with PyTorch
    largest_difference: float  # from PyTorch's embeddings, relative to unit length
    recipe: dict
    proxygml: str = __version__
    version: int = VERSION
    input: str = INPUT
    input_type: str = "uint8"
    input_values: str = "0 to 255"
    colors: str = "RGB"
    preparation: tuple[str, ...] = PREPARATION
    output: str = OUTPUT
    output_type: str = "float32"

    def to_json(self) -> str:
        """JSON text for `from_json`."""
        shapes = {
            "input_shape": ["batch", 3, self.image_size, self.image_size],
            "output_shape": ["batch", self.embedding_dim],
        }
        return json.dumps(asdict(self) | shapes, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Description":
        """The description that `to_json` wrote; a ValueError for any other text."""
        values = parse_json(text)
        if not isinstance(values, dict):
            raise ValueError(f"expected a JSON object, got {type(values).__name__}")
        types = {name: get_origin(hint) or hint for name, hint in get_type_hints(cls).items()}
        for name, expected in types.items():
            if name not in values:
                raise ValueError(f"{name} is missing")
            allowed: Any = {float: (int, float), tuple: list}.get(expected, expected)
            if not isinstance(values[name], allowed) or (isinstance(values[name], bool) and expected is not bool):
                raise ValueError(f"expected {name} as {expected.__name__}, got {values[name]!r}")
        writer = f"written by proxygml {values['proxygml']}, this is {__version__}"
        if values["version"] != VERSION:
            raise ValueError(f"expected version {VERSION}, got {values['version']} ({writer}): export the run again")
        if values["image_size"] < 1 or not 0 < values["crop_fraction"] <= 1:
            raise ValueError(
                f"expected image_size of at least 1 and crop_fraction above 0 and at most 1, got "
                f"{values['image_size']} and {values['crop_fraction']}"
            )
        try:
            Recipe().changed(values["recipe"])
        except ValueError as error:
            raise ValueError(f"{error} ({writer})") from error
        try:
            return cls(**{name: convert(values[name]) for name, convert in types.items()})
        except OverflowError as error:
            raise ValueError(f"a number is too large: {error}") from error


def description_path(path: Path) -> Path:
    """The description of an exported network: model.onnx.json for model.onnx."""
    return path.with_name(path.name + ".json")


def read_description(path: Path, expected_format: str) -> Description:
    """The description of the exported network at `path`, after a check that it belongs to this file."""
    path = Path(path)
    description_file = description_path(path)
    for file in (path, description_file):
        if not file.is_file():
            raise FileNotFoundError(f"no {file}: expected {path.name} and {description_file.name} of proxygml export")
    try:
        description = Description.from_json(description_file.read_text(encoding="utf-8"))
    except ValueError as error:  # includes text that is not JSON
        raise ValueError(f"{description_file} does not describe an exported network: {one_line(error)}") from error
    if description.format != expected_format:
        raise ValueError(f"expected a network exported as {expected_format}, got {path}, which is {description.format}")
    if file_hash(path) != description.sha256:
        raise ValueError(f"{path} is truncated, altered or not described by {description_file.name}: export it again")
    return description


def file_hash(path: Path) -> str:
    """SHA-256 of a file as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def open_session(path: Path) -> "onnxruntime.InferenceSession":
    """An onnxruntime session for an ONNX file, on the CPU."""
    onnxruntime = library("onnxruntime", extra="export", user="an ONNX file")
    try:
        return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's errors have no common base class
        raise ValueError(f"onnxruntime {onnxruntime.__version__} cannot open {path}: {one_line(error)}") from error


@dataclass(frozen=True)
class OnnxModel:
    """A network written by `proxygml export --format onnx`."""

    description: Description
    session: "onnxruntime.InferenceSession"

    @classmethod
    def load(cls, path: Path) -> "OnnxModel":
        """Load model.onnx, described by model.onnx.json."""
        description, session = read_description(path, "onnx"), open_session(path)
        size = session.get_inputs()[0].shape[-1]
        if size != description.image_size:
            raise ValueError(f"{path} takes images of {size} pixels, its JSON says {description.image_size}")
        return cls(description, session)

    @property
    def recipe(self) -> Recipe:
        """The recipe of the exported run."""
        return Recipe().changed(self.description.recipe)

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """Images uint8 (B, 3, H, W) in RGB -> embeddings (B, D)."""
        (embeddings,) = self.session.run([OUTPUT], {INPUT: images})
        return embeddings

    def embed(
        self, images: ImageList, *, batch_size: int = 64, progress: Callable[[int, int], None] | None = None
    ) -> Embeddings:
        """Embeddings of images, cropped as in the tests of the run."""
        description = self.description
        crops = Crops(images.open, images.labels, size=description.image_size, test_crop=description.crop_fraction)
        vectors = []
        with ThreadPoolExecutor() as pool:  # Pillow releases the GIL
            for start in range(0, len(crops), batch_size):
                indices = range(start, min(start + batch_size, len(crops)))
                pixels = np.stack([pixels for pixels, _ in pool.map(crops.__getitem__, indices)])  # (batch, 3, H, W)
                vectors.append(self(pixels))  # (batch, D)
                if progress is not None:
                    progress(indices.stop, len(crops))
        paths, names = np.asarray(images.paths), np.asarray(images.class_names)
        return Embeddings(np.concatenate(vectors), images.labels, paths, names, description.model)
