"""Turn image files into vectors: `python embed.py PHOTO...`. `proxygml export` copies this next to the network."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from decoding import center_box, open_image, resize

FOLDER = Path(__file__).parent
SETTINGS = json.loads((FOLDER / "preprocessing.json").read_text(encoding="utf-8"))


def embed(photos: Sequence[str | Path]) -> np.ndarray:
    """Vectors (M, D) of M image files."""
    session = onnxruntime.InferenceSession(FOLDER / "model.onnx", providers=["CPUExecutionProvider"])
    size = SETTINGS["image_size"]
    vectors = []
    for photo in photos:
        with open_image(photo) as image:
            pixels = resize(image, center_box(*image.size, SETTINGS["crop_fraction"]), (size, size))  # (H, W, 3)
        vectors += session.run(None, {"images": pixels.transpose(2, 0, 1)[None]})  # (1, D)
    return np.concatenate(vectors)


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn image files into vectors.")
    parser.add_argument("photos", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, help="an .npz to write; without it, vectors are printed")
    options = parser.parse_args()
    vectors = embed(options.photos)
    if options.out is None:
        for photo, vector in zip(options.photos, vectors, strict=True):
            print(photo, *vector)
    else:
        paths, labels = map(str, options.photos), (photo.absolute().parent.name for photo in options.photos)
        np.savez(options.out, vectors=vectors, paths=list(paths), labels=list(labels), model=SETTINGS["model"])


if __name__ == "__main__":
    main()
