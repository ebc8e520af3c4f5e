"""Images for the page: cached thumbnails, and uploads, which may be any file."""

import io
import os
import threading
from functools import lru_cache
from html import escape

from PIL import Image

from proxygml.data.decoding import open_image, resize
from proxygml.server.space import Space

SIDES = (96, 224, 512, 2048)  # pixels of the longer side; other sizes are rejected
MAX_CACHED, CACHED_SIDE = 512, 512  # thumbnails, about 10 KB each; larger ones have up to some MB


class Thumbnails:
    """`thumbnails.get(image, side)` -> (bytes, media type); the most recently used are cached."""

    def __init__(self, space: Space, max_cached: int = MAX_CACHED) -> None:
        self._space = space
        self._decoders = threading.BoundedSemaphore(os.cpu_count() or 1)  # large photos decoded at a time
        self.encoded = lru_cache(max_cached)(self._encode)

    def get(self, image: int, side: int) -> tuple[bytes, str]:
        """An image at most `side` pixels wide and high; a gray tile with the reason if it cannot be read."""
        try:
            contents = (self.encoded if side <= CACHED_SIDE else self._encode)(image, side)
        except FileNotFoundError:
            return tile("the file is gone")
        except Image.DecompressionBombError:
            return tile("too large")
        except Exception:  # Pillow raises any type of error on a damaged file
            return tile("cannot be read")
        return contents, "image/png" if contents.startswith(b"\x89PNG") else "image/jpeg"

    def _encode(self, image: int, side: int) -> bytes:
        if self._space.open_image is None:
            raise ValueError("no images")
        with self._decoders, self._space.open_image(image) as opened:
            return thumbnail(opened, side)


def thumbnail(image: Image.Image, side: int) -> bytes:
    """An image, upright and at most `side` pixels wide and high, as JPEG; as PNG if it is as small already."""
    scale = min(1.0, side / max(image.size))
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    small = Image.fromarray(resize(image, (0, 0, *image.size), size))
    contents = io.BytesIO()
    if max(image.size) <= min(side, CACHED_SIDE):
        small.save(contents, format="PNG")
    else:
        small.save(contents, format="JPEG", quality=85)
    return contents.getvalue()


def tile(text: str) -> tuple[bytes, str]:
    """A gray SVG with a text, in place of an image."""
    drawing = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 120 120"><rect width="120" height="120" fill="#8a8f98"/>'
        '<path d="M44 34h32v32H44z M44 66l32-32" fill="none" stroke="#fff" stroke-width="3"/>'
        '<text x="60" y="92" font-family="sans-serif" font-size="13" fill="#fff" text-anchor="middle">'
        f"{escape(text)}</text></svg>"
    )
    return drawing.encode(), "image/svg+xml"


def read_upload(contents: bytes) -> Image.Image:
    """The image of an upload, opened; a ValueError of one line if it is not an image, damaged or too large."""
    if not contents:
        raise ValueError("expected an image, got 0 bytes")
    try:
        with open_image(io.BytesIO(contents)) as image:
            image.draft(None, (1, 1))  # still reads every byte of a JPEG, with less arithmetic
            image.load()
        return open_image(io.BytesIO(contents))  # not yet decoded, so that its crop is the same as that of a file
    except Image.DecompressionBombError as error:
        raise ValueError(f"the image has {error}") from None
    except Exception as error:  # Pillow raises any type of error on a damaged file
        raise ValueError("not a readable image (JPEG, PNG, WebP, GIF, BMP or TIFF), or damaged") from error
