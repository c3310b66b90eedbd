"""An image in a request: a file's bytes, base64 of them, a data URL, or the handle that `put_image` gave.

In a message an image is text: base64, a data URL or a handle. A handle is a hash of its image's content. So a
handle never stands for another image, and all questions about one image have the same affinity. A video is a file
in the same forms, or a list of images, its frames."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from petiole.contract.errors import InvalidRequest

MAX_CHARACTERS = 2**27
"""Maximum length of an image's text in a message. A setting of the worker limits the bytes of an image."""

IMAGE_PARTS = ("image", "image_url", "input_image")
VIDEO_PARTS = ("video", "video_url", "input_video")
MAX_FRAMES = 1024
"""Of a video that is a list. A setting of the worker limits them further."""
MAX_FILES = 8 * MAX_FRAMES
"""Images, videos and frames of a conversation: more than any model takes."""
MAX_FPS = 240
USUAL_FPS = 2.0
DETAILS = ("auto", "low", "high")
"""How closely a model looks at an image, as OpenAI's API says it. low: few tokens; auto is high."""
MAX_PIXELS = 2**31
"""The limit of `min_pixels` and `max_pixels`: more than a file of any worker has."""
HANDLE_PREFIX = "petiole-image:"
_HANDLE = re.compile(HANDLE_PREFIX + "[0-9a-f]{32}")
_DATA_URL = re.compile(r"\s*data:[^,]{0,200};\s*base64\s*,", re.IGNORECASE)
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_SPACE = b" \t\n\v\f\r"
_FRAMES_URL = re.compile(r"\s*data:video/jpeg;\s*base64\s*,", re.IGNORECASE)
"""As vLLM's clients write frames: one data URL with commas between them."""
_FORMS = "must be the bytes of a file, base64 of them, a data URL with base64, or a handle of put_image"


@dataclass(frozen=True, slots=True)
class View:
    """How a model is to look at an image. detail: one of `DETAILS`. min_pixels, max_pixels: of the resized
    picture, or of each frame, for models whose pictures have any size; None: as the model's files say. fps: how
    many frames there are to a second of a video that is a list, or are taken of a second of a file; None:
    `USUAL_FPS`."""

    detail: str = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None
    fps: float | None = None

    def check(self, field: str, *, video: bool = False) -> None:
        """Raises `InvalidRequest`."""
        if self.fps is not None:
            known = type(self.fps) in (int, float) and 0 < self.fps <= MAX_FPS
            if not video:
                raise InvalidRequest(f"{field}.fps", "must not be given: it is of videos", self.fps)
            if not known:
                raise InvalidRequest(f"{field}.fps", f"must be a number above 0, at most {MAX_FPS}", self.fps)
        if video and self.detail != "auto":
            raise InvalidRequest(f"{field}.detail", "must not be given: it is of images", self.detail)
        if self.detail not in DETAILS:
            raise InvalidRequest(f"{field}.detail", f"must be one of {', '.join(DETAILS)}", self.detail)
        for name in _PIXELS:
            given = getattr(self, name)
            if given is not None and (type(given) is not int or not 0 < given <= MAX_PIXELS):
                raise InvalidRequest(f"{field}.{name}", f"must be a number from 1 to {MAX_PIXELS}", given)
        if self.min_pixels is not None and self.max_pixels is not None and self.min_pixels > self.max_pixels:
            limit = f"must be at most {self.max_pixels}, the max_pixels"
            raise InvalidRequest(f"{field}.min_pixels", limit, self.min_pixels)

    def check_of_one_size(self, field: str) -> None:
        """For a model that says itself how many pixels its pictures have. Raises `InvalidRequest`."""
        for name in _PIXELS:
            if (given := getattr(self, name)) is not None:
                raise InvalidRequest(f"{field}.{name}", "must not be given: this model sets it itself", given)


AS_IT_IS = View()
_PIXELS = ("min_pixels", "max_pixels")


def handle_of(data: bytes) -> str:
    return f"{HANDLE_PREFIX}{hashlib.sha256(data).hexdigest()[:32]}"


def is_handle(image: str) -> bool:
    return _HANDLE.fullmatch(image) is not None


def in_text(image: object) -> object:
    """An image as it goes into a message. Other values stay as they are."""
    if isinstance(image, bytes | bytearray | memoryview):
        return base64.b64encode(image).decode()
    return image


def check(field: str, image: object) -> str:
    """Raises `InvalidRequest` for a value that cannot be an image."""
    if not isinstance(image, str):
        raise InvalidRequest(field, _FORMS, type(image).__name__)
    if len(image) > MAX_CHARACTERS:
        raise InvalidRequest(field, f"must have at most {MAX_CHARACTERS} characters", f"{len(image)} characters")
    if not is_handle(image):
        data_of(field, image)
    return image


def data_of(field: str, image: str) -> bytes:
    """The bytes of an image that is in the message itself, in either alphabet of base64, with or without white
    space and padding. A data URL may be percent-encoded. Raises `InvalidRequest`."""
    url = _DATA_URL.match(image)
    try:
        text = image[url.end() if url else 0 :].encode("ascii")
        if url and b"%" in text:
            text = unquote_to_bytes(text)
        text = text.translate(_URL_SAFE, _SPACE)
        return base64.b64decode(text if text.endswith(b"=") else text + b"=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        shown = f"{image[:40]}…" if len(image) > 40 else image
        raise InvalidRequest(field, _FORMS, shown) from None


def identity(field: str, image: str) -> str:
    """The handle of the image, in whatever form it is given."""
    return image if is_handle(image) else handle_of(data_of(field, image))


# ---------------------------------------------------------------- in conversations


@dataclass(frozen=True, slots=True)
class MediaPart:
    """A part of a message that has images. at: its index. files: by what stands behind the part in the name of a
    field, images, or the file of a video; of too many frames the first, one too many. n: how many were given.
    view: how the model is to look at them. said: what the part says of that."""

    at: int
    video: bool
    files: Mapping[str, object]
    n: int
    said: Mapping[str, Any]

    @property
    def field(self) -> str:
        return f"content[{self.at}]"

    @property
    def view(self) -> View:
        return View(**self.said)

    @property
    def bare(self) -> dict[str, Any]:
        """What stands in its place where the files are elsewhere: of a list of frames, with their number."""
        if not self.video:
            return {"type": "image"}
        return {"type": "video"} | ({} if "" in self.files else {"frames": self.n})

    def check(self, field: str) -> None:
        """field: the message's. Raises `InvalidRequest`."""
        own = f"{field}.{self.field}"
        self.view.check(own, video=self.video)
        self.check_number(field)
        for name, file in self.files.items():
            check(f"{own}{name}", file)

    def check_number(self, field: str) -> None:
        """As `check`, of the number of frames alone."""
        if "" not in self.files and not 2 <= self.n <= MAX_FRAMES:
            limit = f"must have 2 to {MAX_FRAMES} frames"
            raise InvalidRequest(f"{field}.{self.field}.video", limit, self.n)

    def in_text(self) -> dict[str, Any]:
        """The part with text in place of bytes."""
        texts = {name: in_text(file) for name, file in self.files.items()}
        kind = "video" if self.video else "image"
        return {"type": kind, kind: texts.get("", [*texts.values()]), **self.said}


def parts_of(message: Mapping[str, Any]) -> Iterator[MediaPart]:
    """The parts of a message of a chat that have images."""
    content = message.get("content")
    for k, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in IMAGE_PARTS or kind in VIDEO_PARTS:
            inner, video = _inner(part), kind in VIDEO_PARTS
            given = inner.get("url") if isinstance(inner, dict) else inner
            files, n = _frames(given) if video else ({"": given}, 1)
            yield MediaPart(k, video, files, n, said(part))


def parts_of_all(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, MediaPart]]:
    """The parts of a chat that have images, each with its message's field. Raises `InvalidRequest` at the first
    that is one too many, or has too many frames."""
    total = 0
    for k, message in enumerate(messages):
        for part in parts_of(message):
            part.check_number(f"messages[{k}]")
            total += part.n
            if total > MAX_FILES:
                raise InvalidRequest("messages", f"must have at most {MAX_FILES} images and frames in all", total)
            yield f"messages[{k}]", part


def _frames(given: object) -> tuple[dict[str, object], int]:
    """The frames of a video, of too many the first, one too many, or its file; and how many were given."""
    n = len(given) if isinstance(given, list) else 1
    if isinstance(given, str) and (url := _FRAMES_URL.match(given)):
        n = given.count(",", url.end()) + 1
        given = given[url.end() :].split(",", MAX_FRAMES)
    if not isinstance(given, list):
        return {"": given}, n
    return {f".video[{k}]": one for k, one in enumerate(given[: MAX_FRAMES + 1])}, n


def _inner(part: Mapping[str, Any]) -> object:
    """What a part holds: the image or the video, or an object with its `url` and perhaps its `detail`."""
    names = ("video_url", "video") if part.get("type") in VIDEO_PARTS else ("image_url", "image")
    return next((part[name] for name in names if name in part), None)


def said(part: Any) -> dict[str, Any]:
    """What a part says of its `View`, itself or with its URL. Empty text says nothing."""
    return {
        name: one[name]
        for one in (part, _inner(part))
        if isinstance(one, dict)
        for name in asdict(AS_IT_IS)
        if one.get(name) not in (None, "")
    }


def with_images_in_text(message: Any) -> Any:
    """A message whose images are text: bytes become base64."""
    found = {part.at: part for part in parts_of(message)} if isinstance(message, dict) else {}
    files = [file for part in found.values() for file in part.files.values()]
    if not any(isinstance(file, bytes | bytearray | memoryview) for file in files):
        return message
    parts = [found[k].in_text() if k in found else part for k, part in enumerate(message["content"])]
    return {**message, "content": parts}


def without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with a bare part in place of each that has images."""
    found = {part.at: part.bare for part in parts_of(message)}
    if not found:
        return dict(message)
    return {**message, "content": [found.get(k, part) for k, part in enumerate(message["content"])]}
