"""What a message's body may cost a worker: a few hundred bytes must not become gigabytes, or seconds.

A body is inflated in one pass that stops at its limit. Then it is decoded, on the consumer's thread. That thread
is the right one because the limits bound the time, too, and because Python parses JSON with its global lock held:
on another thread the parser would stop the event loop all the same. The most costly bodies that pass took this
much of a CPU:

    inflate   16 MiB of gzip 0.1 s     8 MiB of xz 0.2 s     4 MiB of bzip2 0.6 s
    decode    2**19 values: small objects 0.7 s, lists 0.4 s, numbers 0.3 s
"""

from __future__ import annotations

import bz2
import json
import lzma
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kombu import compression
from kombu.exceptions import DecodeError
from kombu.transport import pyamqp
from kombu.transport.virtual import base as virtual

from petiole import memory
from petiole.contract.errors import shorten
from petiole.contract.requests.bounds import MOST_VALUES, values_in
from petiole.tasks.wire.headers import encodes

MiB = 2**20

DEPTH = 200
"""Maximum depth of lists and objects in an envelope or body. Python recurses to parse and to copy JSON."""

RATIO = 100
"""A body may inflate to this many times its bytes. The text of prompts inflates to two to ten times its bytes."""

SMALL_BYTES = MiB
"""A body may inflate to this size, whatever the ratio: a short prompt may repeat one word."""

XZ_MEMORY_BYTES = 80 * MiB
"""Maximum memory for inflating xz. A stream's header says how much it takes; the highest level takes 65 MiB."""

ENCODINGS = frozenset({"utf-8", "utf8", "ascii", "us-ascii", "latin-1", "iso-8859-1", "binary", "ascii-8bit"})
"""The encodings of text that a worker decodes. Others may take a time that is quadratic in the length, such as
punycode; and Python remembers each name that it was asked for."""


@dataclass(frozen=True, slots=True)
class RefusedMessage:
    """`reason` names the field, its limit and its value. `task_id`: the id of the task to fail, if it is
    usable. `headers`: the message's, if an envelope has some."""

    reason: str
    task_id: str | None = None
    headers: object = field(default=None, compare=False, repr=False)


class RefusedError(Exception):
    """Raised for a wrong field, with its limit and value."""

    def __init__(self, field: str, limit: str, *value: object) -> None:
        super().__init__(f"{field} {limit}" + "".join(f", got {shown(one)}" for one in value))


def shown(value: object) -> str:
    """The value without lone surrogates, for the log."""
    return ascii(shorten(value))[1:-1] if not encodes(text := shorten(value)) else text


def named(error: BaseException) -> str:
    return shown(f"{type(error).__name__}: {error}")[1:-1]


# ---------------------------------------------------------------- inflating


class TooLargeError(ValueError):
    def __init__(self, most: int, body: bytes) -> None:
        super().__init__(f"the body must have at most {most} bytes when inflated, of {len(body)} bytes")


@dataclass(frozen=True, slots=True)
class Compression:
    """How to inflate a format, and the most bytes that may come out: as many as take half a second."""

    compress: Callable[[bytes], bytes]
    inflater: Callable[[], Any]
    most_bytes: int

    def inflate(self, body: bytes) -> bytes:
        most = min(self.most_bytes, max(SMALL_BYTES, RATIO * len(body)))
        inflater = self.inflater()
        inflated: bytes = inflater.decompress(body, most)
        if inflater.eof:
            return inflated
        raise TooLargeError(most, body) if len(inflated) >= most else EOFError("the compressed body is cut off")


FORMATS = {
    "application/x-gzip": Compression(zlib.compress, zlib.decompressobj, 16 * MiB),
    "application/x-lzma": Compression(
        lzma.compress, lambda: lzma.LZMADecompressor(memlimit=XZ_MEMORY_BYTES), 8 * MiB
    ),
    "application/x-bz2": Compression(bz2.compress, bz2.BZ2Decompressor, 4 * MiB),
}

register: Any = compression.register  # kombu is only partly typed


def install() -> None:
    """Replace kombu's decoders. Formats that only other packages implement are refused: their decoders have no
    limit."""
    known: Any = compression
    for kind in known.encoders():
        if kind not in FORMATS:
            register(known.get_encoder(kind)[0], lambda body, kind=kind: _refuse(kind), kind)
    for kind, format in FORMATS.items():
        register(format.compress, format.inflate, kind)


def _refuse(kind: str) -> bytes:
    raise ValueError(f"the body must be compressed as one of {', '.join(FORMATS)}, got {kind}")


# ---------------------------------------------------------------- decoding


def check_encoding(content_encoding: str | None) -> None:
    """Check the encoding that a body's bytes are said to have."""
    if content_encoding and content_encoding.lower() not in ENCODINGS:
        raise RefusedError("content_encoding", f"must be one of {', '.join(sorted(ENCODINGS))}", content_encoding)


def check_size(what: str, raw: bytes | str) -> int:
    """Check the size of JSON text before it is parsed. Returns the number of lists and objects that it may
    contain."""
    if len(raw) >= memory.LARGE_BYTES:
        memory.release()
    nested, values = values_in(raw)
    if values > MOST_VALUES:
        raise RefusedError(what, f"must have at most {MOST_VALUES} lists, objects, commas and colons", values)
    return nested


def parse(what: str, raw: bytes) -> tuple[Any, int]:
    """Parse JSON text of an allowed size. The depth is yet to be checked: a deeper text than Python can parse
    raises RecursionError. Also returns the number of lists and objects that it may contain."""
    nested = check_size(what, raw)
    return json.loads(raw), nested


def check_depth(what: str, value: object, most: int | None = None) -> None:
    """Check the depth of parsed JSON. `most`: an upper bound of its lists and objects."""
    if most is not None and most <= DEPTH:
        return
    level: Sequence[Any] = [value]
    for _ in range(DEPTH + 1):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list | tuple)
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list | tuple)
        ]
        if not level:
            return
    raise RefusedError(what, f"must have at most {DEPTH} levels of lists and objects")


_pyamqp: Any = pyamqp  # kombu is only partly typed
_virtual: Any = virtual


class BrokerMessage:
    """A message of kombu's that inflates and decodes its body within the limits: `RedisMessage` is `transport`'s,
    `RabbitMessage` `rabbitmq`'s. `queue`: from which it was taken. What a producer says of that in the message
    need not be so.

    A refused message keeps nothing alive. kombu keeps the traceback of an error in the message, or in a frame of
    that traceback. The traceback's frames keep the message, and all that was inflated: a circle, which stays until
    the garbage collector runs. Here errors have no traceback of kombu's."""

    queue: str = ""
    errors: Any
    body: Any
    content_encoding: Any
    _decoded_cache: Any

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.errors = [(kind, error.with_traceback(None), None) for kind, error, _ in self.errors]

    def decode(self) -> Any:
        """The decoded body. Raises kombu's DecodeError."""
        if self._decoded_cache:
            return self._decoded_cache
        stock: Any = super()
        try:
            check_encoding(self.content_encoding)
            nested = check_size("body", self.body) if isinstance(self.body, bytes | str) else None
            decoded = stock.decode()
            check_depth("body", decoded, nested)
        except (RefusedError, RecursionError) as error:
            self._decoded_cache = None
            raise DecodeError(str(error)) from None
        except Exception as error:
            raise error.with_traceback(None) from None
        return decoded

    def _reraise_error(self, callback: Callable[[Any, Exception], object] | None = None) -> None:
        """Pass the first error to `callback`, or raise it."""
        error = self.errors[0][1]
        if callback is None:
            raise error
        callback(self, error)

    def forget(self) -> None:
        """Drop what was received. The message can still be acknowledged."""
        self.errors, self.body, self._decoded_cache = [], b"", None


class RedisMessage(BrokerMessage, _virtual.Message):  # type: ignore[misc]
    def __init__(self, payload: Any, channel: Any = None, **options: Any) -> None:
        super().__init__(payload, channel=channel, **options)
        self.queue = payload.get("queue", "")

    def forget(self) -> None:
        super().forget()
        self._raw = None


class RabbitMessage(BrokerMessage, _pyamqp.Message):  # type: ignore[misc]
    def __init__(self, content: Any, channel: Any = None, **options: Any) -> None:
        super().__init__(content, channel=channel, **options)
        self.queue = getattr(content, "queue", "")
        if reason := getattr(content, "unreadable", None):
            self.errors.append((DecodeError, DecodeError(reason), None))
