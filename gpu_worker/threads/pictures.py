"""From a file to a picture, by rules that do not depend on who reads it.

    formats      JPEG, PNG and WebP; no animations
    rotation     as EXIF says
    16 bits      scaled to 8
    alpha        on white
    CMYK, grey, palettes    to RGB

A file's header is read when its request is prepared. The header gives format and size, so a file that would become
gigabytes is refused before anything is decoded. The file is decoded only if a step needs its crops.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from petiole.gpu_worker.config import EngineConfig
from petiole.gpu_worker.errors import InvalidRequest, require
from petiole.gpu_worker.request.images import PreparedImage, RequestImage
from petiole.gpu_worker.request.skills import Processor

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("JPEG", "PNG", "WEBP")
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I")
_READABLE = "must be a JPEG, PNG or WebP file that can be read"


def request_image(data: bytes, field: str, processor: Processor, config: EngineConfig) -> RequestImage:
    """The image of a file: hashed, with its header read. Raises InvalidRequest, here and in `cut`."""
    limit = config.image_max_bytes
    require(len(data) > 0, field, _READABLE, "an empty file")
    require(len(data) <= limit, field, f"must have at most {limit} bytes", f"{len(data)} bytes")
    with _opened(data, field) as picture:
        width, height = picture.size
        pixels = f"must have at most {config.image_max_pixels} pixels"
        require(width * height <= config.image_max_pixels, field, pixels, f"{width} x {height}")
        still = picture.format == "JPEG" or picture.format == "MPO" or not getattr(picture, "is_animated", False)
        require(still, field, "must be one picture, and no animation", f"an animated {picture.format}")
    content_hash = content_hash_of(data)
    return RequestImage(
        content_hash,
        processor.n_positions(width, height),
        cut=partial(_cut, data, content_hash, field, processor),
    )


def warm_up() -> Image.Image:
    """A white picture, read from a file of each format, so that the first request need not load the readers."""
    from PIL import Image

    picture = Image.new("RGB", (32, 32), "white")
    for kind in FORMATS:
        file = BytesIO()
        picture.save(file, kind)
        picture = decoded(file.getvalue(), "a white picture")
    return picture


def content_hash_of(data: bytes) -> int:
    """The first 128 bits of the file's SHA-256."""
    return int.from_bytes(hashlib.sha256(data).digest()[:16], "big")


def _cut(data: bytes, content_hash: int, field: str, processor: Processor) -> PreparedImage:
    return processor.prepared(decoded(data, field), content_hash)


def decoded(data: bytes, field: str) -> Image.Image:
    """A file as an RGB picture. Raises InvalidRequest."""
    with _opened(data, field) as picture:
        try:
            picture.load()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # decoders raise all kinds of errors for damaged files
            raise _unreadable(field, error) from None
        return _rgb(_turned(picture))


def _opened(data: bytes, field: str) -> Image.Image:
    from PIL import Image

    try:
        return Image.open(BytesIO(data), formats=FORMATS)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise _unreadable(field, error) from None


def _unreadable(field: str, error: BaseException) -> InvalidRequest:
    from PIL import Image, UnidentifiedImageError

    if isinstance(error, Image.DecompressionBombError):
        return InvalidRequest(field, "must have fewer pixels", str(error))
    reason = "another format" if isinstance(error, UnidentifiedImageError) else f"{type(error).__name__}: {error}"
    return InvalidRequest(field, _READABLE, reason)


def _turned(picture: Image.Image) -> Image.Image:
    from PIL import ImageOps

    with suppress(Exception):  # a picture with broken EXIF stays as it is
        picture = ImageOps.exif_transpose(picture)
    return picture


def _rgb(picture: Image.Image) -> Image.Image:
    from PIL import Image

    if picture.mode in _SIXTEEN_BITS:
        grey = np.asarray(picture).astype(np.uint32)
        return Image.fromarray(((grey + 128) // 257).clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.has_transparency_data:
        pixels = picture.convert("RGBA")
        white = Image.new("RGBA", pixels.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, pixels).convert("RGB")
    return picture.convert("RGB")
