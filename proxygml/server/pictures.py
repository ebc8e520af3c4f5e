"""Images for the page: small ones of what is shown, kept in bounded memory, and uploads that may be anything."""

import io
import os
import threading
import warnings
from collections import OrderedDict
from html import escape

from PIL import Image

from proxygml.data import open_image
from proxygml.data.check import MAX_PIXELS as MOST_SHOWN
from proxygml.data.images import resize, upright_size
from proxygml.server.space import Space

SIDES = (96, 224, 512)  # pixels of the longer side; no other size is made
MOST_KEPT = 64 * 2**20  # bytes
MOST_PIXELS = 64_000_000  # of an upload: a small file may hold a picture that fills the memory


class Thumbnails:
    """`thumbnails.of(image, side)` -> (bytes, media type); those used last are kept."""

    def __init__(self, space: Space, most_kept: int = MOST_KEPT) -> None:
        self._space, self._most_kept, self._lock = space, most_kept, threading.Lock()
        self._room = threading.BoundedSemaphore(os.cpu_count() or 1)  # large photos that are decoded at a time
        self._kept: OrderedDict[tuple[int, int], bytes] = OrderedDict()
        self.size = 0  # bytes that are kept

    def of(self, image: int, side: int) -> tuple[bytes, str]:
        """Image `image`, at most `side` pixels wide and high; a gray tile that says so where it cannot be read."""
        with self._lock:
            if (image, side) in self._kept:
                self._kept.move_to_end((image, side))
                return _typed(self._kept[image, side])
        if self._space.open_image is None:
            return tile("cannot be read")
        try:
            with self._room, self._space.open_image(image) as opened:
                if opened.width * opened.height > MOST_SHOWN:
                    return tile("too large")
                contents = shrunk(opened, side)
        except FileNotFoundError:
            return tile("the file is gone")
        except Exception:  # Pillow raises what it likes on a damaged file; the page has to go on
            return tile("cannot be read")
        with self._lock:
            self.size += len(contents) - len(self._kept.pop((image, side), b""))
            self._kept[image, side] = contents
            while self.size > self._most_kept:
                self.size -= len(self._kept.popitem(last=False)[1])
        return _typed(contents)


def shrunk(image: Image.Image, side: int) -> bytes:
    """An image, upright and at most `side` pixels wide and high: a JPEG, or a PNG where it is that small already."""
    width, height = upright_size(image)
    share = min(1.0, side / max(width, height))
    size = max(1, round(width * share)), max(1, round(height * share))
    small = Image.fromarray(resize(image, (0, 0, width, height), size))
    contents = io.BytesIO()
    small.save(contents, **({"format": "PNG"} if share == 1 else {"format": "JPEG", "quality": 85}))
    return contents.getvalue()


def _typed(contents: bytes) -> tuple[bytes, str]:
    return contents, "image/png" if contents.startswith(b"\x89PNG") else "image/jpeg"


def tile(text: str) -> tuple[bytes, str]:
    """A gray picture that says why there is no other."""
    drawing = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 120 120"><rect width="120" height="120" fill="#8a8f98"/>'
        '<path d="M44 34h32v32H44z M44 66l32-32" fill="none" stroke="#fff" stroke-width="3"/>'
        '<text x="60" y="92" font-family="sans-serif" font-size="13" fill="#fff" text-anchor="middle">'
        f"{escape(text)}</text></svg>"
    )
    return drawing.encode(), "image/svg+xml"


def read_upload(contents: bytes) -> Image.Image:
    """The image that a person sent, decoded; what is none, or too large, is a ValueError of one line."""
    if not contents:
        raise ValueError("the file is empty: choose a photo")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = open_image(io.BytesIO(contents))
        if image.width * image.height > MOST_PIXELS:
            raise Image.DecompressionBombError
        image.load()
        return image
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise ValueError(f"the image has more than {MOST_PIXELS // 10**6} million pixels: make it smaller") from None
    except Exception as error:  # Pillow raises what it likes on a damaged file
        names = "JPEG, PNG, WebP, GIF, BMP or TIFF"
        raise ValueError(f"this is no image that can be read ({names}), or it is damaged") from error
