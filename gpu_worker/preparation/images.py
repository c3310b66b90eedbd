"""From a file to a picture, by rules that do not depend on who reads it.

    formats      JPEG, PNG and WebP; no animations
    rotation     as EXIF says
    16 bits      scaled to 8
    alpha        on white, and so is the one colour that a PNG names as transparent
    CMYK, grey, palettes    to RGB

A file's header is read when its request is prepared. The header gives format and size, so a file that would become
gigabytes is refused before anything is decoded. What the picture becomes follows from its size as EXIF turns it.
The file is decoded only if a step needs its pixels.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from petiole.contract.requests.images import AS_IT_IS, View
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.exceptions import InvalidRequest, require
from petiole.gpu_worker.request.prepared_images import ImageLayout, PreparedImage, RequestImage
from petiole.gpu_worker.request.skills import Pictures

if TYPE_CHECKING:
    from PIL import Image, ImageFile

FORMATS = ("JPEG", "PNG", "WEBP")
LOW_DETAIL = 256
"""The most tokens of an image that is to be seen in low detail."""
_SIXTEEN_BITS = ("I;16", "I;16B", "I;16L", "I")
_ONE_CLEAR_COLOUR = ("1", "L", "RGB", *_SIXTEEN_BITS)
"""Modes without alpha. A PNG of such a mode may name one colour that is transparent."""
MOST_SEGMENTS = 10_000
"""Segments of a file. The largest pictures have a few thousand, of several kilobytes each."""
MOST_SCANS = 100
"""Scans of a progressive JPEG. Encoders make about ten."""
_MOST_EXIF = 2**16
"""Bytes. A JPEG's segment cannot have more."""
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)
"""The tag of EXIF, and its values for pictures whose rows are columns."""
_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
_MARKER = re.compile(rb"\xff[\x01-\xcf\xd8-\xfe]")
"""A JPEG segment's marker. Within a scan a byte 255 is followed by 0, or by one that tells where to go on."""
_SCAN, _END = 0xDA, 0xD9
_ALONE = (0x01, 0xD8, _END)
"""Markers without a length."""
_DEPTH_AT = 24  # of a PNG's bytes: the bits of a sample
_READABLE = "must be a JPEG, PNG or WebP file that can be read"


def request_image(
    data: bytes, field: str, pictures: Pictures, config: EngineConfig, view: View = AS_IT_IS
) -> RequestImage:
    """The image of a file: hashed, with its header read. Raises InvalidRequest, here and in `cut`."""
    size = checked_size(data, field, config)
    view.check(field)
    most = min(config.image_tokens, LOW_DETAIL) if view.detail == "low" else config.image_tokens
    layout = pictures.layout(*size, field, most, view)
    key = layout.key(content_hash_of(data))
    cut = partial(_cut, data, key, field, pictures, size, layout)
    return RequestImage(key, layout.n_positions, layout.rotary, cut, size=layout.size)


def checked_size(data: bytes, field: str, config: EngineConfig) -> tuple[int, int]:
    """(width, height) of the picture of a file, as it is turned, by its header. Raises InvalidRequest."""
    limit = config.image_max_bytes
    require(len(data) > 0, field, _READABLE, "an empty file")
    require(len(data) <= limit, field, f"must have at most {limit} bytes", f"{len(data)} bytes")
    segments, scans = parts_of(data)
    require(segments <= MOST_SEGMENTS, field, f"must have at most {MOST_SEGMENTS} segments", "more")
    require(scans <= MOST_SCANS, field, f"must have at most {MOST_SCANS} scans", "more")
    with _opened(data, field) as picture:
        width, height = picture.size
        pixels = f"must have at most {config.image_max_pixels} pixels"
        require(width * height <= config.image_max_pixels, field, pixels, f"{width} x {height}")
        still = picture.format == "JPEG" or picture.format == "MPO" or not getattr(picture, "is_animated", False)
        require(still, field, "must be one picture, and no animation", f"an animated {picture.format}")
        return turned_size(picture)


def parts_of(data: bytes) -> tuple[int, int]:
    """How many chunks a PNG has, or segments and scans a JPEG, counted as far as the limits. A reader takes
    microseconds for a segment of four bytes, and tens of milliseconds for a scan of a hundred bytes."""
    segments = scans = 0
    at, png = 8, data.startswith(_PNG)
    while png and segments <= MOST_SEGMENTS and at < len(data):
        last = data[at + 4 : at + 8] == b"IEND"
        segments, at = segments + 1, len(data) if last else at + 12 + int.from_bytes(data[at : at + 4], "big")
    at = 2 if data.startswith(_JPEG) else len(data)
    while segments <= MOST_SEGMENTS and scans <= MOST_SCANS and at < len(data):
        marker = _MARKER.search(data, at)
        if not scans:  # a reader steps through what stands before a marker, byte by byte
            segments += (marker.start() if marker else len(data)) - at
        if marker is None:
            break
        kind, at = data[marker.end() - 1], marker.end()
        if kind == _END and scans:
            break
        segments, scans = segments + 1, scans + (kind == _SCAN)
        at += 0 if kind in _ALONE else max(2, int.from_bytes(data[at : at + 2], "big"))
    return segments, scans


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


def _cut(
    data: bytes, key: int, field: str, pictures: Pictures, size: tuple[int, int], layout: ImageLayout
) -> PreparedImage:
    picture = decoded(data, field) if layout.size is None else decoded_of_size(data, field, size)
    return pictures.prepared(picture, key, layout)


def decoded_of_size(data: bytes, field: str, size: tuple[int, int]) -> Image.Image:
    """As `decoded`. size: what the header says."""
    picture, how = decoded(data, field), "must say before its pixels how it is turned"
    require(picture.size == size, field, how, f"{size} in its header, and {picture.size}")
    return picture


def decoded(data: bytes, field: str) -> Image.Image:
    """A file as an RGB picture. Raises InvalidRequest."""
    from PIL import Image

    with _opened(data, field) as picture:
        try:
            picture.load()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # decoders raise all kinds of errors for damaged files
            raise _unreadable(field, error) from None
        turned = _turned(picture)
        rgb, clear = _rgb(turned), _clear(turned, data, field)
    if clear is None:
        return rgb
    pixels = np.array(rgb)
    pixels[clear] = 255
    return Image.fromarray(pixels)


def _opened(data: bytes, field: str) -> ImageFile.ImageFile:
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

    if len(picture.info.get("exif") or b"") > _MOST_EXIF:
        del picture.info["exif"]
    with suppress(Exception):  # a picture with broken EXIF stays as it is
        picture = ImageOps.exif_transpose(picture)
    return picture


def turned_size(picture: Image.Image) -> tuple[int, int]:
    """(width, height) of a picture as its header says that it is turned. Its pixels are not decoded."""
    from PIL import Image

    width, height = picture.size
    if len(picture.info.get("exif") or b"") > _MOST_EXIF:
        return width, height
    with suppress(Exception):  # as in `_turned`
        if Image.Image.getexif(picture).get(_ORIENTATION) in _ON_ITS_SIDE:  # a PNG's own method decodes it
            return height, width
    return width, height


def _rgb(picture: Image.Image) -> Image.Image:
    from PIL import Image

    if picture.mode in _SIXTEEN_BITS:
        grey = np.asarray(picture).astype(np.uint32)
        return Image.fromarray(((grey + 128) // 257).clip(0, 255).astype(np.uint8)).convert("RGB")
    if picture.mode not in _ONE_CLEAR_COLOUR and picture.has_transparency_data:
        pixels = picture.convert("RGBA")
        white = Image.new("RGBA", pixels.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, pixels).convert("RGB")
    return picture.convert("RGB")


def _clear(picture: Image.Image, data: bytes, field: str) -> npt.NDArray[np.bool_] | None:
    """bool [height, width]: where the picture has the colour that its PNG names as transparent. None without such
    a colour. Samples are compared with all their bits: two colours may be equal in 8 bits and not in 16."""
    named = picture.info.get("transparency")
    if named is None or picture.mode not in _ONE_CLEAR_COLOUR:
        return None
    depth = data[_DEPTH_AT]
    most = (1 << depth) - 1
    if picture.mode == "RGB":
        colour = np.array(named) & most
        clear = (np.asarray(picture) == colour >> (depth - 8)).all(-1)
        if depth == 16:
            clear &= (np.asarray(_low_bytes(data, field)) == colour & 255).all(-1)
    elif picture.mode in _SIXTEEN_BITS:
        clear = np.asarray(picture) == named
    else:
        scale = 255 // most  # Pillow scales the samples, and not the colour
        clear = np.asarray(picture.convert("L")) == (named if picture.mode == "1" else (named & most) * scale)
    return np.asarray(clear, np.bool_)


def _low_bytes(data: bytes, field: str) -> Image.Image:
    """The low bytes of a PNG with 16 bits of each colour, of which Pillow gives the high ones: it takes the first
    byte of each pair as the high one if it reads big-endian samples, and the second if little-endian ones."""
    with _opened(data, field) as picture:
        picture.tile = [tile._replace(args="RGB;16L") for tile in picture.tile]
        picture.load()
        return _turned(picture)
