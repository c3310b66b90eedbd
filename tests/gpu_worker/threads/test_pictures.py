"""Files to pictures: the right picture by the stated rules, or a clear error."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from petiole.gpu_worker import EngineConfig, InvalidRequest
from petiole.gpu_worker.models.moondream.config import MoondreamConfig, parse_moondream_config
from petiole.gpu_worker.models.moondream.processor import MoondreamProcessor
from petiole.gpu_worker.threads.pictures import content_hash_of, decoded, request_image
from tests.support.pictures import file, picture, saved

CONFIG: MoondreamConfig = parse_moondream_config({})
PROCESSOR = MoondreamProcessor(CONFIG)
LIMITS = EngineConfig(image_max_bytes=300_000, image_max_pixels=100_000)


def read(data: bytes) -> Any:
    return np.asarray(decoded(data, "image")).astype(int)


def near(data: bytes, expected: Image.Image, most: int = 0) -> bool:
    return bool(np.abs(read(data) - np.asarray(expected.convert("RGB")).astype(int)).max() <= most)


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_formats_without_loss(kind: str, options: dict[str, Any]) -> None:
    assert near(file(3, kind, **options), picture(3))


def test_jpeg() -> None:
    data = file(3, "JPEG", quality=95)
    with Image.open(__import__("io").BytesIO(data)) as reference:
        assert near(data, reference)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_picture(kind: str, orientation: int) -> None:
    turns = [None, 0, 3, 1, 5, 4, 6, 2]
    method = turns[orientation - 1]
    expected = picture(3) if method is None else picture(3).transpose(Image.Transpose(method))
    exif = Image.Exif()
    exif[0x0112] = orientation
    back = {None: None, 0: 0, 3: 3, 1: 1, 5: 5, 4: 2, 6: 6, 2: 4}[method]
    stored = expected if back is None else expected.transpose(Image.Transpose(back))
    options = {"lossless": True} if kind == "WEBP" else {}
    found = read(saved(stored, kind, exif=exif, **options))
    assert found.shape == np.asarray(expected).shape
    assert np.abs(found - np.asarray(expected)).mean() < 6


def test_broken_exif_turns_nothing() -> None:
    data = saved(picture(3), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff")
    assert read(data).shape == (110, 130, 3)


def test_sixteen_bits_of_grey_are_scaled() -> None:
    ramp = np.arange(0, 65536, 16, dtype=np.uint16).reshape(64, 64)
    found = read(saved(Image.fromarray(ramp)))
    assert (found[..., 0] == (ramp.astype(int) + 128) // 257).all()
    assert found.min() == 0
    assert found.max() == 255


def test_sixteen_bits_of_colour_are_scaled() -> None:
    rows = np.zeros((2, 2, 3), ">u2")
    rows[0, 0], rows[1, 1] = (65535, 32896, 0), (257, 0, 65535)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    found = read(png(2, 2, raw, depth=16, colour=2))
    assert found[0, 0].tolist() == [255, 128, 0]
    assert found[1, 1].tolist() == [1, 0, 255]


def png(width: int, height: int, raw: bytes, depth: int = 8, colour: int = 0) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_is_white(mode: str) -> None:
    clear = Image.new("RGBA", (8, 8), (10, 20, 30, 0))
    clear.paste((0, 0, 0, 255), (0, 0, 4, 8))
    made = clear.convert(mode) if mode != "P" else clear.quantize(4)
    found = read(saved(made))
    assert (found[:, 4:] == 255).all()
    assert (found[:, :4] < 10).all()


def test_half_transparent_is_mixed_with_white() -> None:
    assert abs(read(saved(Image.new("RGBA", (4, 4), (0, 0, 0, 128))))[0, 0, 0] - 127) <= 1


@pytest.mark.parametrize("mode", ["CMYK", "L", "1", "P"])
def test_other_modes_become_rgb(mode: str) -> None:
    made = picture(3).convert(mode)
    kind, most = ("JPEG", 40) if mode == "CMYK" else ("PNG", 0)
    assert near(saved(made, kind), made, most)


def test_one_pixel_becomes_crops() -> None:
    image = request_image(file(size=(1, 1)), "image", PROCESSOR, LIMITS)
    assert image.cut is not None
    prepared = image.cut()
    assert prepared.pixels.shape == (2, 378, 378, 3)
    assert prepared.content_hash == image.content_hash < 2**128


def test_equal_files_have_one_hash_and_others_another() -> None:
    assert content_hash_of(file(1)) == content_hash_of(file(1)) != content_hash_of(file(2))


def animated(kind: str) -> bytes:
    return saved(picture(1), kind, save_all=True, append_images=[picture(2)], duration=100)


def bomb() -> bytes:
    """A header of 20,000 x 20,000 pixels."""
    return png(20_000, 20_000, b"\0" * 30)


BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "JPEG, PNG or WebP"),
    "no image": (b"hello" * 40, "JPEG, PNG or WebP"),
    "gif": (saved(picture().convert("P"), "GIF"), "JPEG, PNG or WebP"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "JPEG, PNG or WebP"),
    "tiff": (saved(picture(), "TIFF"), "JPEG, PNG or WebP"),
    "only a header": (file()[:40], "JPEG, PNG or WebP"),
    "animated png": (animated("PNG"), "no animation"),
    "animated webp": (animated("WEBP"), "no animation"),
    "gigantic": (bomb(), "pixels"),
    "too many pixels": (file(size=(400, 400)), "at most 100000 pixels, got 400 x 400"),
    "too many bytes": (b"x" * 300_001, "at most 300000 bytes, got 300001 bytes"),
}


@pytest.mark.parametrize(("data", "limit"), BAD.values(), ids=BAD)
def test_bad_files_are_refused_before_they_are_decoded(data: bytes, limit: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        request_image(data, "image", PROCESSOR, LIMITS)
    assert caught.value.field == "image"
    assert limit in str(caught.value)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_broken_body_is_an_error(kind: str) -> None:
    data = file(3, kind)
    with pytest.raises(InvalidRequest, match="image: must be a JPEG, PNG or WebP file that can be read"):
        decoded(data[: len(data) * 2 // 3], "image")
