"""Videos as files: the frames that transformers takes of them, and what is refused by its field."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path
from queue import LifoQueue
from typing import Any

import numpy as np
import pytest
from PIL import Image

from petiole.contract.requests.images import View
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.children import Child, _video
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.models.vision.frames import TimedVideos
from petiole.gpu_worker.models.vision.pictures import GridPictures
from petiole.gpu_worker.preparation import videos
from petiole.gpu_worker.preparation.videos import VideoReader
from petiole.gpu_worker.request.prepared_images import ImageLimits
from tests.support.seeing import as_file, drawn_film, drawn_picture

av: Any = pytest.importorskip("av")

VIDEOS = TimedVideos(GridPictures(16, 2, least=4096, most=40_000), 3, 2, (1, 2))
LIMITS = ImageLimits(1024, 4096, 4096, bidirectional=False, placeholder=3, patches=4)
AT = "messages[0].content[0]"


def reader(**settings: Any) -> VideoReader:
    return VideoReader(VIDEOS, LIMITS, EngineConfig(device="cpu", **settings))


FILM = drawn_film()


@pytest.mark.parametrize(
    ("kind", "codec"), [("mp4", "mpeg4"), ("mov", "mpeg4"), ("webm", "libvpx"), ("matroska", "mpeg4")]
)
@pytest.mark.parametrize(("n", "rate", "fps"), [(40, 10, None), (25, 24, 4), (9, 3, 30), (3, 1, 2)])
def test_the_frames_are_those_that_transformers_takes(
    kind: str, codec: str, n: int, rate: int, fps: float | None, tmp_path: Path
) -> None:
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor as Theirs
    from transformers.video_utils import read_video_pyav

    data, path = drawn_film(n, rate, kind, codec), tmp_path / "film"
    path.write_bytes(data)
    if kind in ("mp4", "mov"):
        names = ("fps", "num_frames", "min_frames", "max_frames")
        processor = type("Fields", (), {name: getattr(Theirs, name) for name in names})
        taken = partial(Theirs.sample_frames, processor, fps=fps)
        frames, metadata = read_video_pyav(str(path), taken)
        numbers = metadata.frames_indices.tolist()
    else:  # whose headers do not count their frames, which transformers asks them for
        numbers = np.linspace(0, n - 1, min(max(int(n / rate * (fps or 2)), 4), n)).round().astype(int).tolist()
        with av.open(str(path)) as container:
            all_ = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        frames = np.stack([all_[k] for k in numbers])
    found = reader().of_file(data, AT, View(fps=fps))
    pairs = [(numbers[k], numbers[min(k + 1, len(numbers) - 1)]) for k in range(0, len(numbers), 2)]
    assert list(found.written[::4]) == [f"<{(a + b) / rate / 2:.1f} seconds>" for a, b in pairs]
    own = [image.cut() for image in found.images if image.cut]
    size = own[0].pixels.shape[2], own[0].pixels.shape[1]
    resized = [np.array(Image.fromarray(frame).resize(size, 3)) for frame in frames]
    for k, one in enumerate(own):
        expected = [resized[2 * k], resized[min(2 * k + 1, len(resized) - 1)]]
        assert (one.pixels == np.stack(expected)).all()
        assert one.n_patches == 4 * one.n_positions


def test_pixels_are_made_again_after_a_preemption() -> None:
    images = reader().of_file(FILM, AT, View()).images
    first = [image.cut().pixels for image in images if image.cut]
    again = [image.cut().pixels for image in reversed(images) if image.cut]
    assert all((a == b).all() for a, b in zip(first, again[::-1], strict=True))
    assert len({image.content_hash for image in images}) == len(images)


def test_a_turned_film_is_turned(monkeypatch: pytest.MonkeyPatch) -> None:
    class Turned:
        rotation = -90

        def to_image(self) -> Image.Image:
            return drawn_picture(96, 64)

    assert _video._turned(Turned()).size == (64, 96)
    assert (np.array(_video._turned(Turned())) == np.rot90(np.array(drawn_picture(96, 64)), -1)).all()


CUT = [FILM[: len(FILM) // 2], FILM[:40], b"", b"\x00" * 100, FILM[:4] + b"ftyp" + b"\xff" * 5000]


@pytest.mark.parametrize("data", [*CUT, as_file(drawn_picture(40, 40)), b"#EXTM3U\nfile:///etc/passwd"])
def test_a_damaged_file_is_refused_by_its_field(data: bytes) -> None:
    assert refused(data) == AT


def refused(data: bytes) -> str | None:
    """The field of the error, if there is one; pixels are pixels."""
    try:
        for image in reader().of_file(data, AT, View()).images:
            assert image.cut
            assert image.cut().pixels.dtype == np.uint8
    except InvalidRequest as error:
        return error.field
    return None


def test_bits_that_flip_end_in_frames_or_in_a_refusal() -> None:
    rng = np.random.RandomState(3)
    for _ in range(60):
        data = np.frombuffer(FILM, np.uint8).copy()
        data[rng.randint(0, len(data), rng.randint(1, 30))] ^= 1 << rng.randint(0, 8)
        assert refused(data.tobytes()) in (AT, None)


@pytest.mark.parametrize(
    ("settings", "limit"),
    [
        ({"video_seconds": 3}, "must be at most 3 s long, got 4.0 s"),
        ({"video_max_bytes": 1000}, "must have 1 to 1000 bytes"),
        ({"image_max_pixels": 6000}, "must have frames of 1 to 6000 pixels, got 96 x 64"),
        ({"video_tokens": 3}, "must be a video of at most 3 positions"),
    ],
)
def test_limits_of_a_file(settings: dict[str, Any], limit: str) -> None:
    with pytest.raises(InvalidRequest, match=limit) as caught:
        reader(**settings).of_file(FILM, AT, View())
    assert caught.value.field == AT


def test_of_a_long_file_fewer_frames_are_taken() -> None:
    found = reader(video_frames=6).of_file(FILM, AT, View())
    assert [one for one in found.written if isinstance(one, str)] == [
        "<0.4 seconds>",
        "<1.9 seconds>",
        "<3.5 seconds>",
    ]


def test_without_the_extra_a_file_is_refused_and_frames_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(InvalidRequest, match=r"lacks petiole\[video\]"):
        reader().of_file(FILM, AT, View())
    assert len(reader().of_frames([as_file(drawn_picture(40, 40))] * 3, AT, View()).images) == 2


def test_decoders_that_are_not_needed_are_not_run() -> None:
    with pytest.raises(InvalidRequest, match="one of the decoders h264"):
        reader().of_file(drawn_film(5, 5, "matroska", "mjpeg"), AT, View())


@pytest.mark.parametrize(
    ("files", "field", "limit"),
    [
        ([drawn_picture(40, 40)] * 65, ".video", "2 to 64 frames, got 65"),
        ([drawn_picture(40, 40), drawn_picture(40, 50)], ".video[1]", "as large as the first frame"),
        ([drawn_picture(40, 40), None], ".video[1]", "must be a JPEG, PNG or WebP file"),
    ],
)
def test_limits_of_a_list(files: list[Any], field: str, limit: str) -> None:
    data = [b"no picture" if one is None else as_file(one) for one in files]
    with pytest.raises(InvalidRequest, match=limit) as caught:
        reader().of_frames(data, AT, View())
    assert caught.value.field == f"{AT}{field}"


def test_a_list_may_not_be_longer_than_a_file() -> None:
    with pytest.raises(InvalidRequest, match="at most 600 s long, got 6000"):
        reader().of_frames([as_file(drawn_picture(40, 40))] * 60, AT, View(fps=0.01))


def remuxed(data: bytes, begin: float) -> bytes:
    """A film that begins later, without being coded again: an MP4 file says which frames are not shown."""
    file, options = BytesIO(), {"avoid_negative_ts": "disabled"}
    with av.open(BytesIO(data)) as given, av.open(file, "w", format="mp4", options=options) as made:
        (stream,) = given.streams.video
        copy = made.add_stream_from_template(stream)
        for packet in given.demux(stream):
            if packet.size:
                packet.pts -= int(begin / stream.time_base)
                packet.dts -= int(begin / stream.time_base)
                packet.stream = copy
                made.mux(packet)
    return file.getvalue()


def test_frames_that_were_trimmed_off_are_not_counted() -> None:
    images = reader().of_file(remuxed(FILM, 0.5), AT, View()).images
    whole = reader().of_file(FILM, AT, View()).images[-1]
    assert images[-1].cut
    assert whole.cut
    assert (images[-1].cut().pixels[-1] == whole.cut().pixels[-1]).all()
    assert videos.opened(remuxed(FILM, 0.5), AT, 10**6).n == 35


def tables(data: bytes, change: Callable[[bytes, bytes], bytes]) -> bytes:
    """An MP4 file whose tables are changed. change: from a table's name and content to another content."""
    made, at = b"", 0
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        own = data[at + 8 : at + size]
        own = tables(own, change) if name in (b"moov", b"trak", b"mdia", b"minf", b"stbl") else change(name, own)
        made, at = made + struct.pack(">I4s", 8 + len(own), name) + own, at + size
    return made


def claiming(n: int, size: int) -> Callable[[bytes, bytes], bytes]:
    """That there are `n` frames of `size` bytes, all in one place."""

    def change(name: bytes, own: bytes) -> bytes:
        said = {
            b"stsz": struct.pack(">II", size, n),
            b"stts": struct.pack(">III", 1, n, 1024),
            b"stsc": struct.pack(">IIII", 1, 1, 1 if size > 1 else n, 1),
        }
        if name == b"stco" and size > 1:
            return own[:4] + struct.pack(">I", n) + own[8:12] * n
        return own[:4] + said[name] if name in said else own

    return change


def test_a_small_file_fills_no_memory() -> None:
    """Its tables are read when it is opened, before anything can be counted."""
    assert refused(tables(FILM, claiming(2**27, 1))) == AT
    assert refused(FILM) is None


def test_frames_that_share_their_bytes_are_not_read_again_and_again() -> None:
    data = tables(FILM, claiming(1000, len(FILM) // 2))
    with pytest.raises(InvalidRequest, match="got frames that are larger than the file"):
        reader().of_file(data, AT, View())


def test_every_frame_has_the_size_of_the_first() -> None:
    file = BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("libvpx", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for film in (drawn_film(2, 10, "webm", "libvpx"), drawn_film(2, 10, "webm", "libvpx", (480, 320))) * 2:
            with av.open(BytesIO(film)) as given:
                for packet in given.demux(video=0):
                    if packet.size:
                        packet.stream, packet.pts, packet.dts = stream, None, None
                        container.mux(packet)
    film = videos.opened(file.getvalue(), AT, 10**6)
    with pytest.raises(InvalidRequest, match=r"frames of one size, got \(96, 64\) and \(480, 320\)"):
        film.pixels([0, film.n - 1], (96, 64), 3)


def test_a_child_that_takes_too_long_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    job, own = tmp_path / "job.py", LifoQueue[Child]()
    job.write_text(f"{Path(_video.__file__).read_text()}\nCPU_S = 60.0\nWALL_S = 1e-6\n")
    own.put(Child(str(job)))
    monkeypatch.setattr(videos, "_children", own)
    for _ in range(2):
        with pytest.raises(
            InvalidRequest, match="can be read within 120 s of processor time and 2147483648 bytes"
        ):
            reader().of_file(FILM, AT, View())
