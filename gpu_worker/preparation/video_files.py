"""The frames of a video's file, by PyAV, the binding of FFmpeg's libraries: `pip install 'petiole[video]'`.

Only MP4, QuickTime, WebM and Matroska are read, as their first bytes say: other formats may name other files. Its
packets are counted and one frame is decoded when the request is prepared. So most damage is known then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from petiole.gpu_worker.exceptions import InvalidRequest, require

if TYPE_CHECKING:
    from PIL import Image

MOST_DECODED = 2**36
"""Pixels of all frames up to the last one that is taken: about 33,000 of 1920 x 1080."""
_READABLE = "must be an MP4, MOV, WebM or MKV file that can be read"
_EBML = b"\x1a\x45\xdf\xa3"
_DECODERS = ("h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "mpeg4")
"""FFmpeg has hundreds, of which files of strangers may choose."""


@dataclass(frozen=True, slots=True)
class Film:
    """n: frames; rate: how many there are to a second; size: (width, height), as they are turned."""

    data: bytes
    field: str
    n: int
    rate: float
    size: tuple[int, int]

    def pictures(self, numbers: Sequence[int]) -> Iterator[Image.Image]:
        """The frames of these ascending numbers. Raises InvalidRequest."""
        wanted, found = set(numbers), 0
        with _decoding(self.data, self.field) as container:
            for k, frame in enumerate(container.decode(video=0)):
                if k in wanted:
                    picture = _turned(frame)
                    alike = "must have frames of one size"
                    require(picture.size == self.size, self.field, alike, f"{self.size} and {picture.size}")
                    found += 1
                    yield picture
                if k >= numbers[-1]:
                    break
        require(found == len(numbers), self.field, _READABLE, f"{found} of {len(numbers)} frames")


def opened(data: bytes, field: str, most_pixels: int) -> Film:
    """A file whose packets are counted, and whose first frame is decoded. Raises InvalidRequest."""
    with _decoding(data, field) as container:
        require(bool(container.streams.video), field, "must have a video stream", "none")
        stream = container.streams.video[0]
        width, height, decoder = (
            stream.codec_context.width,
            stream.codec_context.height,
            stream.codec_context.codec,
        )
        known = f"must be coded for one of the decoders {', '.join(_DECODERS)}"
        require(decoder.name in _DECODERS, field, known, decoder.name)
        n, rate = sum(1 for packet in container.demux(stream) if packet.size), float(stream.average_rate or 0)
        size = f"must have frames of 1 to {most_pixels} pixels"
        require(0 < width * height <= most_pixels, field, size, f"{width} x {height}")
        whole = f"must have at most {MOST_DECODED} pixels in all frames"
        require(n * width * height <= MOST_DECODED, field, whole, f"{n} frames of {width} x {height}")
        require(n > 0 and rate > 0, field, "must say how many frames there are to a second", f"{n} frames, {rate}")
    with _decoding(data, field) as container:
        first = next(container.decode(video=0), None)
        if first is None:
            raise InvalidRequest(field, _READABLE, "no frame")
        return Film(data, field, n, rate, _turned(first).size)


@contextmanager
def _decoding(data: bytes, field: str) -> Iterator[Any]:
    """An open container, whose errors are the field's."""
    try:
        import av
    except ImportError:
        install = "must be a list of frames: this worker lacks petiole[video]"
        raise InvalidRequest(field, install, "a file") from None
    kind = "matroska" if data.startswith(_EBML) else "mov" if data[4:8] == b"ftyp" else None
    if kind is None:
        raise InvalidRequest(field, _READABLE, "another format")
    try:
        with av.open(BytesIO(data), format=kind) as container:
            yield container
    except InvalidRequest:
        raise
    except Exception as error:  # decoders raise all kinds of errors for damaged files
        raise InvalidRequest(field, _READABLE, f"{type(error).__name__}: {error}"[:200]) from None


def _turned(frame: Any) -> Image.Image:
    """An RGB picture. A file says by how many degrees its frames are turned, in quarters."""
    picture: Image.Image = frame.to_image()
    return picture.rotate(frame.rotation, expand=True) if frame.rotation % 360 else picture
