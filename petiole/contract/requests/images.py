"""An image in a request: a file's bytes, base64 of them, a data URL, or the handle that `put_image` gave.

In a message an image is text: base64, a data URL or a handle. A handle is a hash of its image's content. So a
handle never stands for another image, and all questions about one image have the same affinity."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import unquote_to_bytes

from petiole.contract.errors import InvalidRequest

MAX_CHARACTERS = 2**27
"""Maximum length of an image's text in a message. A setting of the worker limits the bytes of an image."""

IMAGE_PARTS = ("image", "image_url", "input_image")
DETAILS = ("auto", "low", "high")
"""How closely a model looks at an image, as OpenAI's API says it. low: few tokens; auto is high."""
MAX_PIXELS = 2**31
"""The limit of `min_pixels` and `max_pixels`: more than a file of any worker has."""
HANDLE_PREFIX = "petiole-image:"
_HANDLE = re.compile(HANDLE_PREFIX + "[0-9a-f]{32}")
_DATA_URL = re.compile(r"\s*data:[^,]{0,200};\s*base64\s*,", re.IGNORECASE)
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_SPACE = b" \t\n\v\f\r"
_FORMS = "must be the bytes of a file, base64 of them, a data URL with base64, or a handle of put_image"


@dataclass(frozen=True, slots=True)
class View:
    """How a model is to look at an image. detail: one of `DETAILS`. min_pixels, max_pixels: of the resized
    picture, for models whose pictures have any size; None: as the model's files say."""

    detail: str = "auto"
    min_pixels: int | None = None
    max_pixels: int | None = None

    def check(self, field: str) -> None:
        """Raises `InvalidRequest`."""
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


def parts_of(message: Mapping[str, Any]) -> Iterator[tuple[int, object]]:
    """The images in a message of a chat, each with the index of its part."""
    content = message.get("content")
    for k, part in enumerate(content if isinstance(content, list) else ()):
        if isinstance(part, dict) and part.get("type") in IMAGE_PARTS:
            inner = _inner(part)
            yield k, inner.get("url") if isinstance(inner, dict) else inner


def _inner(part: Mapping[str, Any]) -> object:
    """What a part of an image holds: the image, or an object with its `url` and perhaps its `detail`."""
    return part.get("image_url", part.get("image"))


def views_of(message: Mapping[str, Any]) -> Iterator[tuple[int, View]]:
    """How each image in a message of a chat is to be looked at, with the index of its part."""
    for k, _ in parts_of(message):
        yield k, View(**said(message["content"][k]))


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
    found = dict(parts_of(message)) if isinstance(message, dict) else {}
    if not any(isinstance(image, bytes | bytearray | memoryview) for image in found.values()):
        return message
    parts = [
        {"type": "image", "image": in_text(found[k]), **said(part)} if k in found else part
        for k, part in enumerate(message["content"])
    ]
    return {**message, "content": parts}


def without_images(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message with a bare part of type "image" in place of each image."""
    found = dict(parts_of(message))
    if not found:
        return dict(message)
    content = [{"type": "image"} if k in found else part for k, part in enumerate(message["content"])]
    return {**message, "content": content}
