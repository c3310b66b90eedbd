"""Files to pictures: the right picture by the stated rules, or a clear error."""

from __future__ import annotations

import random
import struct
import zlib
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from PIL import Image

from petiole.gpu_worker import EngineConfig, InvalidRequest
from petiole.gpu_worker.models.moondream.config import MoondreamConfig, parse_moondream_config
from petiole.gpu_worker.models.moondream.processor import MoondreamProcessor
from petiole.gpu_worker.preparation.images import content_hash_of, decoded, request_image
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


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(
    width: int,
    height: int,
    raw: bytes,
    depth: int = 8,
    colour: int = 0,
    *,
    interlaced: bool = False,
    more: tuple[tuple[bytes, bytes], ...] = (),
) -> bytes:
    """more: kinds and contents of other chunks."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    others = b"".join(chunk(kind, data) for kind, data in more)
    body = chunk(b"IHDR", header) + others + chunk(b"IDAT", zlib.compress(raw)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


PASSES = ((0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1))
"""Of Adam7: first row and column, and the steps of both."""


def png_of(samples: np.ndarray, depth: int, clear: Any, *, interlaced: bool = False, turned: int = 1) -> bytes:
    """A PNG of samples [height, width] or [height, width, 3], of which `clear` is transparent; filtered by the
    sample to the left if the samples are whole bytes."""
    colour, (height, width) = (2 if samples.ndim == 3 else 0), samples.shape[:2]
    passes = PASSES if interlaced else ((0, 0, 1, 1),)
    raw = b"".join(
        row_of(row, depth) for at, to, down, right in passes for row in samples[at::down, to::right] if row.size
    )
    tiff = struct.pack("<2sHIHHHIHHI", b"II", 42, 8, 1, 0x0112, 3, 1, turned, 0, 0)
    named = b"".join(struct.pack(">H", value) for value in np.atleast_1d(clear))
    more = ((b"tRNS", named), *(((b"eXIf", tiff),) if turned > 1 else ()))
    return png(width, height, raw, depth, colour, interlaced=interlaced, more=more)


def row_of(row: np.ndarray, depth: int) -> bytes:
    if depth < 8:
        bits = (row[:, None] >> np.arange(depth)[::-1] & 1).astype(np.uint8)
        return b"\0" + np.packbits(bits).tobytes()
    data = row.astype(">u2" if depth == 16 else np.uint8).tobytes()
    back = depth // 8 * (3 if row.ndim == 2 else 1)
    left = np.frombuffer(data, np.uint8).copy()
    left[back:] -= np.frombuffer(data, np.uint8)[:-back]
    return b"\1" + left.tobytes()


def shown(samples: np.ndarray, depth: int, clear: Any) -> np.ndarray:
    """What a reader of PNG should see: 8 bits of each colour, on white."""
    most = 2**depth - 1
    if samples.ndim == 3:
        rgb = samples >> 8 if depth == 16 else samples
    else:
        grey = (samples + 128) // 257 if depth == 16 else samples * 255 // most
        rgb = grey[..., None].repeat(3, axis=2)
    here = samples == np.asarray(clear)
    return np.where((here.all(-1) if samples.ndim == 3 else here)[..., None], 255, rgb)


@pytest.mark.parametrize("interlaced", [False, True], ids=["in order", "interlaced"])
@pytest.mark.parametrize("turned", [1, 3, 6])
@pytest.mark.parametrize(
    ("depth", "channels"), [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (8, 3), (16, 3)], ids=str
)
def test_the_transparent_colour_of_a_png_is_white_and_no_other_is(
    depth: int, channels: int, turned: int, interlaced: bool
) -> None:
    """Among colours that differ from the transparent one in one bit, the lowest one of 16 too."""
    rng = np.random.RandomState(depth * channels)
    most = 2**depth - 1
    clear = rng.randint(0, most + 1, channels) if depth > 1 else np.array([0])
    samples = rng.randint(0, most + 1, (13, 11, channels))
    samples[rng.rand(13, 11) < 0.4] = clear
    changed = rng.rand(13, 11) < 0.3
    samples[changed] = clear
    samples[changed, rng.randint(0, channels, changed.sum())] ^= 1 << rng.randint(0, depth, changed.sum())
    samples[0, :3], samples[1, 0] = clear, clear ^ 1
    if channels == 1:
        samples, clear = samples[..., 0], clear[0]
    wanted = shown(samples, depth, clear)
    assert (wanted == 255).all(-1).any()
    assert depth == 1 or not (wanted == 255).all()
    data = png_of(samples, depth, clear, interlaced=interlaced, turned=turned)
    wanted = {1: wanted, 3: wanted[::-1, ::-1], 6: np.rot90(wanted, -1)}[turned]
    assert (read(data) == wanted).all()


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_only_as_many_bits_of_the_transparent_colour_count_as_samples_have(depth: int) -> None:
    samples = np.array([[0, 1], [1, 0]])
    assert (read(png_of(samples, depth, 0xFF00 + 1)) == shown(samples, depth, 1)).all()


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


# ------------------------------------------------------------ bombs


def with_chunks(*chunks: bytes, after: bool = False) -> bytes:
    """A PNG of 8 x 8 pixels with chunks before its pixels, or after them."""
    plain, given = png(8, 8, bytes(8 * 25), depth=8, colour=2), b"".join(chunks)
    at = plain.index(b"IEND") - 4 if after else plain.index(b"IDAT") - 4
    return plain[:at] + given + plain[at:]


def with_segments(given: bytes) -> bytes:
    plain = file(3, "JPEG")
    return plain[:2] + given + plain[2:]


def with_scans(n: int) -> bytes:
    plain = file(3, "JPEG", progressive=True)
    last = plain.rindex(b"\xff\xda")
    return plain[:-2] + plain[last:-2] * n + plain[-2:]


ZEROS = zlib.compress(bytes(10_000_000), 9)
MANY = 10_001
BOMBS: dict[str, tuple[bytes, str]] = {
    "a compressed text": (with_chunks(chunk(b"zTXt", b"a\0\0" + ZEROS)), "MAX_TEXT_CHUNK"),
    "a compressed text after the pixels": (with_chunks(chunk(b"zTXt", b"a\0\0" + ZEROS), after=True), "MAX_TEXT"),
    "a compressed profile": (with_chunks(chunk(b"iCCP", b"a\0\0" + ZEROS)), "MAX_TEXT_CHUNK"),
    "chunks without end": (with_chunks(*[chunk(b"prVt", b"")] * MANY), "at most 10000 segments"),
    "pixels in chunks without end": (with_chunks(*[chunk(b"IDAT", b"")] * MANY), "at most 10000 segments"),
    "segments without end": (with_segments(b"\xff\xe5\0\2" * MANY), "at most 10000 segments"),
    "nothing without end": (with_segments(b"\xff" * MANY), "at most 10000 segments"),
    "nothing, and no marker": (b"\xff\xd8" + b"\xff" * 900_000 + b"\0", "at most 10000 segments"),
    "bytes that are skipped": (with_segments(bytes(MANY)), "at most 10000 segments"),
    "scans without end": (with_scans(100), "at most 100 scans"),
    "an animated WebP": (
        saved(picture(3), "WEBP", save_all=True, append_images=[picture(4), picture(5)]),
        "must be one picture, and no animation",
    ),
}


@pytest.mark.parametrize(("data", "why"), BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_by_its_limit(data: bytes, why: str) -> None:
    roomy = EngineConfig(image_max_bytes=1_000_000)
    with pytest.raises(InvalidRequest, match=why):
        request_image(data, "image", PROCESSOR, roomy).cut()


def test_a_picture_may_have_some_of_each() -> None:
    for data in (with_chunks(*[chunk(b"prVt", b"")] * 100), with_segments(b"\xff\xe5\0\2" * 100), with_scans(9)):
        assert read(data).shape[-1] == 3


def test_exif_beyond_a_segment_is_not_read() -> None:
    tags = b"".join(struct.pack("<HHLL", i, 7, 300_000, 0) for i in range(65_535))
    exif = b"II*\0\x08\0\0\0" + struct.pack("<H", 65_535) + tags + bytes(4)
    assert read(with_chunks(chunk(b"eXIf", exif))).shape == (8, 8, 3)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_damaged_file_is_read_or_refused(kind: str) -> None:
    draw, whole = random.Random(kind), file(3, kind)
    for _ in range(200):
        data = bytearray(whole[: draw.choice((len(whole), len(whole), draw.randrange(len(whole))))])
        for _ in range(draw.choice((1, 3, 20))):
            if data:
                data[draw.randrange(min(len(data), draw.choice((40, 400, 10**6))))] = draw.randrange(256)
        with suppress(InvalidRequest):
            request_image(bytes(data), "image", PROCESSOR, LIMITS).cut()
