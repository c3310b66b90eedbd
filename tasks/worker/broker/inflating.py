"""Decompression with a limit, for kombu: a few kilobytes must not become gigabytes of a worker's memory."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import Any

from kombu import compression

LARGEST_BYTES = 256 * 2**20
"""Maximum size of a message's body: far more than the longest prompt that a worker takes."""


class TooLargeError(ValueError):
    def __init__(self) -> None:
        super().__init__(f"the body must have at most {LARGEST_BYTES} bytes when decompressed")


def _inflate(body: bytes, decompressor: Any) -> bytes:
    inflated: bytes = decompressor.decompress(body, LARGEST_BYTES)
    if not decompressor.eof:
        raise TooLargeError if len(inflated) >= LARGEST_BYTES else EOFError("the compressed body is cut off")
    return inflated


register: Any = compression.register  # kombu is only partly typed


def install() -> None:
    """Replace the decoders of kombu that Python's library implements. The others need packages that are not
    installed with Petiole."""
    makers: dict[str, tuple[Callable[[bytes], bytes], Callable[[], Any]]] = {
        "application/x-gzip": (zlib.compress, zlib.decompressobj),
        "application/x-bz2": (bz2.compress, bz2.BZ2Decompressor),
        "application/x-lzma": (lzma.compress, lzma.LZMADecompressor),
    }
    for kind, (encode, make) in makers.items():
        register(encode, lambda body, make=make: _inflate(body, make()), kind)
