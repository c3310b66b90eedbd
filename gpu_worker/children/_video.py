"""Reads the file of a video by PyAV, the binding of FFmpeg's libraries: the job of `preparation.videos`.

A question is a line of JSON, and the file. The frames' answer is bytes, every other one JSON. The file imports
nothing of Petiole."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import Any

CPU_S = 120.0
WALL_S = 2 * CPU_S
MEMORY_BYTES = 2**31
MOST_DECODED = 2**36
"""Pixels of all frames up to the last one that is taken: about 33,000 of 1920 x 1080."""
DECODERS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4")
"""FFmpeg has hundreds, of which files of strangers may choose."""
READABLE = "must be an MP4, MOV, WebM or MKV file that can be read"
_EBML = b"\x1a\x45\xdf\xa3"
_PADDING = 1024
"""How much wider and higher a frame may be in a decoder."""


class Refused(Exception):  # noqa: N818
    """(limit, value)"""


def answer(question: bytes) -> dict[str, Any] | bytes:
    """What `described` or `pixels` return, or why the file is refused."""
    line, _, data = question.partition(b"\n")
    given = json.loads(line)
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)  # whose signal ends the process, too
    try:
        return pixels(data, **given) if "numbers" in given else described(data, **given)
    except Refused as refused:
        return {"refused": refused.args}
    except MemoryError:
        return {"refused": [f"{READABLE} with {MEMORY_BYTES} bytes of memory", "more"]}
    except Exception as error:  # decoders raise all kinds of errors for damaged files
        return {"refused": [READABLE, f"{type(error).__name__}: {error}"[:200]]}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def described(data: bytes, most_pixels: int) -> dict[str, Any]:
    """Count a file's frames, and decode the first one. coded, size: (width, height), before it is turned and
    after."""
    with _opened(data) as (container, stream):
        width, height = stream.codec_context.width, stream.codec_context.height
        limit = f"must have frames of 1 to {most_pixels} pixels"
        _require(0 < width * height <= most_pixels, limit, f"{width} x {height}")
        n = total = 0
        for packet in container.demux(stream):
            n += bool(packet.size and not packet.is_discard)
            total += packet.size
            _require(total <= len(data), READABLE, "frames that are larger than the file")
            limit = f"must have at most {MOST_DECODED} pixels in all frames"
            _require(n * width * height <= MOST_DECODED, limit, f"{n} frames of {width} x {height} and more")
        rate = float(stream.average_rate or 0)
        limit = "must say how many frames there are to a second"
        _require(n > 0 and rate > 0, limit, f"{n} frames, {rate}")
    with _opened(data) as (container, stream):
        first = next(container.decode(stream), None)
        if first is None:
            raise Refused(READABLE, "no frame")
        _require(first.width * first.height <= most_pixels, READABLE, "a frame that is larger than it says")
        size = _turned(first).size
    return {"n": n, "rate": rate, "coded": [first.width, first.height], "size": size}


def pixels(
    data: bytes, numbers: list[int], coded: list[int], size: list[int], to: list[int], resample: int
) -> bytes:
    """RGB of the frames of these ascending numbers, which are resized `to` (width, height). All frames must be as
    large as the first one."""
    wanted, found = set(numbers), list[bytes]()
    with _opened(data) as (container, stream):
        for k, frame in enumerate(container.decode(stream)):
            _same([frame.width, frame.height], coded)
            if k in wanted:
                picture = _turned(frame)
                _same(list(picture.size), size)
                found.append(picture.resize(to, resample).tobytes())
            if k >= numbers[-1]:
                break
    _require(len(found) == len(numbers), READABLE, f"{len(found)} of {len(numbers)} frames")
    return b"".join(found)


@contextmanager
def _opened(data: bytes) -> Iterator[tuple[Any, Any]]:
    """A container and its stream. Other formats may name other files."""
    import av

    kind = "matroska" if data.startswith(_EBML) else "mov" if data[4:8] == b"ftyp" else None
    _require(kind is not None, READABLE, "another format")
    options = {"codec_whitelist": ",".join(DECODERS), "protocol_whitelist": ""}
    with av.open(BytesIO(data), format=kind, options=options) as container:
        _require(bool(container.streams.video), "must have a video stream", "none")
        stream = container.streams.video[0]
        context = stream.codec_context
        name = "another" if context is None else context.codec.name
        _require(name in DECODERS, f"must be coded for one of the decoders {', '.join(DECODERS)}", name)
        context.thread_count = 1  # each thread reserves memory
        context.options = {"max_pixels": str((context.width + _PADDING) * (context.height + _PADDING))}
        yield container, stream


def _turned(frame: Any) -> Any:
    """An RGB picture. A file says by how many degrees its frames are turned, in quarters."""
    picture = frame.to_image()
    return picture.rotate(frame.rotation, expand=True) if frame.rotation % 360 else picture


def _same(size: list[int], first: list[int]) -> None:
    _require(size == first, "must have frames of one size", f"{tuple(first)} and {tuple(size)}")


def _require(condition: bool, limit: str, value: str) -> None:
    if not condition:
        raise Refused(limit, value)
