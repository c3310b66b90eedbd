"""Cache tokens: the identity of the input at each KV position, encoded as one int64.

A sequence is a numpy array of *codes* with exactly one code per KV position. So offsets in the array are KV
positions, and comparing two prompts is comparing two arrays.

    code >= 0                       a text token: the code is its id
    code <  0   kind 1              a coordinate: its bin
                kind 2              a size: both bins
                kind 3              one position of an image: serial of the image, offset inside it

An image has one code per KV position. The offset in a code gives the start of the image, so one code is enough to
check whether a cut splits it. The 128-bit content hash does not fit into a code. Instead, each distinct live
(hash, length) has a serial number, which is never reused. Code that stores codes of an image must also store its
`ImageIdentity`, which keeps the serial alive. Equal codes therefore mean equal content.

The typed tokens below are the public input format, with a `cache_key()` and a `kv_length()` each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeAlias, cast
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from petiole.cache.exceptions import MisalignedError, TokenError

Codes: TypeAlias = NDArray[np.int64]

_COORD, _SIZE, _IMAGE = 1, 2, 3
_BASE = -(1 << 63)
_KIND_SHIFT = 60
_BIN_BITS = 30
_OFFSET_BITS = 24
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_FIRST_IMAGE_CODE = _BASE + (_IMAGE << _KIND_SHIFT)


class TextToken(NamedTuple):
    """A vocabulary token."""

    token_id: int

    def cache_key(self) -> tuple[int, ...]:
        return (0, self.token_id)

    def kv_length(self) -> int:
        return 1


class CoordToken(NamedTuple):
    """A coordinate. `bin` identifies it; `pos` is used for the embedding only."""

    pos: float
    bin: int

    def cache_key(self) -> tuple[int, ...]:
        return (1, self.bin)

    def kv_length(self) -> int:
        return 1


class SizeToken(NamedTuple):
    """A size. The bins identify it; the floats are used for the embedding only."""

    width: float
    height: float
    width_bin: int
    height_bin: int

    def cache_key(self) -> tuple[int, ...]:
        return (2, self.width_bin, self.height_bin)

    def kv_length(self) -> int:
        return 1


class ImageToken(NamedTuple):
    """A whole image: its 128-bit content hash and its number of KV positions."""

    content_hash: int
    kv_length_: int

    def cache_key(self) -> tuple[int, ...]:
        return (3, self.content_hash, self.kv_length_)

    def kv_length(self) -> int:
        return self.kv_length_


ValueToken: TypeAlias = CoordToken | SizeToken
"""A token that stands for a value: its key names the value's kind, and then its numbers."""

CacheToken: TypeAlias = TextToken | ValueToken | ImageToken


class ImageIdentity:
    """The serial number of a distinct image. Reserved as long as this object is referenced."""

    __slots__ = ("__weakref__", "content_hash", "kv_length", "serial")

    def __init__(self, content_hash: int, kv_length: int, serial: int) -> None:
        self.content_hash = content_hash
        self.kv_length = kv_length
        self.serial = serial


class _ImageRegistry:
    """Serial numbers of live images. Thread-safe: preparation threads call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive: WeakValueDictionary[tuple[int, int], ImageIdentity] = WeakValueDictionary()
        self._next_serial = 0

    def identity(self, image: ImageToken) -> ImageIdentity:
        if not 0 < image.kv_length_ <= _OFFSET_MASK:
            raise TokenError(f"image kv_length must be in 1..{_OFFSET_MASK}, got {image.kv_length_}")
        key = (image.content_hash, image.kv_length_)
        with self._lock:
            known = self._alive.get(key)
            if known is None:
                known = ImageIdentity(*key, self._next_serial)
                self._next_serial += 1
                self._alive[key] = known
            return known


_images = _ImageRegistry()


def _check_bin(field: str, value: int) -> int:
    if not 0 <= value < 1 << _BIN_BITS:
        raise TokenError(f"{field} must be in 0..{(1 << _BIN_BITS) - 1}, got {value}")
    return value


def _check_text(token_id: int) -> int:
    if not 0 <= token_id < 1 << 63:
        raise TokenError(f"token id must be in 0..2**63-1, got {token_id}")
    return token_id


def _single_code(token: TextToken | ValueToken | int) -> int:
    if isinstance(token, CoordToken):
        return _BASE + (_COORD << _KIND_SHIFT) + _check_bin("bin", token.bin)
    if isinstance(token, SizeToken):
        width, height = _check_bin("width_bin", token.width_bin), _check_bin("height_bin", token.height_bin)
        return _BASE + (_SIZE << _KIND_SHIFT) + (width << _BIN_BITS) + height
    return _check_text(token.token_id if isinstance(token, TextToken) else int(token))


def _image_codes(identity: ImageIdentity) -> Codes:
    first = _FIRST_IMAGE_CODE + (identity.serial << _OFFSET_BITS)
    return np.arange(first, first + identity.kv_length, dtype=np.int64)


def boundary(codes: Codes, kv: int) -> int:
    """The largest cut at or below `kv` that does not split an image."""
    if kv >= len(codes):
        return len(codes)
    code = codes.item(kv)
    if _FIRST_IMAGE_CODE <= code < 0:
        return kv - (code & _OFFSET_MASK)
    return kv


def page_boundary(codes: Codes, kv: int, page_size: int) -> int:
    """The largest multiple of `page_size` at or below `kv` that does not split an image."""
    while True:
        cut = kv // page_size * page_size
        kv = boundary(codes, cut)
        if kv == cut or kv == len(codes):
            return cut


def reuse_limit(codes: Codes, page_size: int) -> int:
    """The number of leading positions that may be reused from a cache: whole pages, without the last token."""
    return page_boundary(codes, boundary(codes, max(len(codes) - 1, 0)), page_size)


class CacheTokens:
    """An append-only sequence of cache tokens: codes, and the identities of their images.

    `len()` counts tokens, `kv_length` counts KV positions; they differ for images. Appending is amortised O(1).
    Existing entries never change, so prefixes share the memory.
    """

    __slots__ = ("_buffer", "_images", "_kv_length")

    def __init__(self, codes: Codes | None = None, images: tuple[ImageIdentity, ...] = ()) -> None:
        self._buffer: Codes = np.empty(0, dtype=np.int64) if codes is None else codes
        self._kv_length = len(self._buffer)
        self._images = images

    @classmethod
    def from_text(cls, ids: NDArray[np.integer] | Iterable[int]) -> CacheTokens:
        """Text token ids. An int64 array is used without a copy and must not be modified afterwards."""
        return cls(_text_codes(ids))

    @classmethod
    def from_ids(cls, ids: NDArray[np.int64], typed: Mapping[int, CacheToken | int]) -> CacheTokens:
        """One id per KV position, int64 [kv_length]. `typed`: tokens of other kinds, by the position where each
        begins; the ids at their positions are ignored. Raises MisalignedError if a token does not lie within
        them."""
        codes = ids.copy()
        images: list[ImageIdentity] = []
        for at, token in typed.items():
            end = at + (token.kv_length_ if isinstance(token, ImageToken) else 1)
            if at < 0 or end > len(codes):
                raise MisalignedError(f"a token at positions {at}..{end} does not lie within {len(codes)} ids")
            if isinstance(token, ImageToken):
                images.append(_images.identity(token))
                codes[at : at + token.kv_length_] = 0
            else:
                codes[at] = 0
        codes = _text_codes(codes)
        kept = iter(images)
        for at, token in typed.items():
            if isinstance(token, ImageToken):
                codes[at : at + token.kv_length_] = _image_codes(next(kept))
            else:
                codes[at] = _single_code(token)
        return cls(codes, tuple(images))

    @classmethod
    def from_tokens(cls, tokens: Iterable[CacheToken | int]) -> CacheTokens:
        """Typed tokens; integers are text token ids."""
        result = cls()
        pending: list[int] = []
        for token in tokens:
            if isinstance(token, ImageToken):
                result._grow(np.array(pending, dtype=np.int64))
                result._append_image(token)
                pending.clear()
            else:
                pending.append(_single_code(token))
        result._grow(np.array(pending, dtype=np.int64))
        return result

    @property
    def codes(self) -> Codes:
        """One code per KV position: int64 [kv_length], a view."""
        return self._buffer[: self._kv_length]

    @property
    def kv_length(self) -> int:
        return self._kv_length

    @property
    def images(self) -> tuple[ImageIdentity, ...]:
        return self._images

    def __len__(self) -> int:
        return self.token_index(self._kv_length)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self.cache_keys())

    def __repr__(self) -> str:
        return f"CacheTokens(tokens={len(self)}, kv_length={self._kv_length})"

    def append(self, token: CacheToken | int) -> None:
        if isinstance(token, ImageToken):
            self._append_image(token)
            return
        code = _single_code(token)
        if self._kv_length == len(self._buffer):
            self._enlarge(self._kv_length + 1)
        self._buffer[self._kv_length] = code
        self._kv_length += 1

    def extend(self, tokens: CacheTokens | NDArray[np.integer] | Iterable[CacheToken | int]) -> None:
        other = as_tokens(tokens)
        self._grow(other.codes)
        self._images += other.images

    def prefix(self, kv_length: int) -> CacheTokens:
        """The tokens of the first `kv_length` positions, sharing memory. Raises MisalignedError if that splits a
        token."""
        if not 0 <= kv_length <= self._kv_length:
            raise MisalignedError(f"prefix of {kv_length} positions requested of {self._kv_length}")
        if self._images and boundary(self.codes, kv_length) != kv_length:
            raise MisalignedError(f"position {kv_length} lies inside an image")
        return CacheTokens(self._buffer[:kv_length], self._images)

    def token_index(self, kv: int) -> int:
        """The number of tokens in the first `kv` positions."""
        if not self._images:
            return kv
        codes = self._buffer[:kv]
        return kv - int(np.count_nonzero((codes < 0) & (codes >= _FIRST_IMAGE_CODE) & (codes & _OFFSET_MASK != 0)))

    def content(self, start: int, end: int) -> bytes:
        """What is at these positions, in bytes that mean the same in every process: an image by its hash and the
        offset in it. Equal bytes mean equal content."""
        codes = self._buffer[start:end]
        seen = (codes < 0) & (codes >= _FIRST_IMAGE_CODE)
        if not seen.any():
            return codes.tobytes()
        payload = codes[seen] - _FIRST_IMAGE_CODE
        by_serial = {image.serial: image for image in self._images}
        plain = codes.copy()
        plain[seen] = _FIRST_IMAGE_CODE + (payload & _OFFSET_MASK)
        images = (by_serial[serial] for serial in (payload >> _OFFSET_BITS).tolist())
        return plain.tobytes() + b"".join(
            image.content_hash.to_bytes(16, "little") + image.kv_length.to_bytes(4, "little") for image in images
        )

    def cache_keys(self) -> list[tuple[int, ...]]:
        """The `cache_key()` of each token, for tests and debugging."""
        by_serial = {image.serial: image for image in self._images}
        keys: list[tuple[int, ...]] = []
        for code in self.codes.tolist():
            kind, payload = (code - _BASE) >> _KIND_SHIFT, (code - _BASE) & ((1 << _KIND_SHIFT) - 1)
            if code >= 0:
                keys.append((0, code))
            elif kind == _COORD:
                keys.append((1, payload))
            elif kind == _SIZE:
                keys.append((2, payload >> _BIN_BITS, payload & ((1 << _BIN_BITS) - 1)))
            elif payload & _OFFSET_MASK == 0:
                image = by_serial[payload >> _OFFSET_BITS]
                keys.append((3, image.content_hash, image.kv_length))
        return keys

    def _append_image(self, image: ImageToken) -> None:
        identity = _images.identity(image)
        self._grow(_image_codes(identity))
        self._images += (identity,)

    def _grow(self, codes: Codes) -> None:
        end = self._kv_length + len(codes)
        if end > len(self._buffer):
            self._enlarge(end)
        self._buffer[self._kv_length : end] = codes
        self._kv_length = end

    def _enlarge(self, needed: int) -> None:
        buffer = np.empty(max(needed, 2 * len(self._buffer), 64), dtype=np.int64)
        buffer[: self._kv_length] = self.codes
        self._buffer = buffer


def _text_codes(ids: NDArray[np.integer] | Iterable[int]) -> Codes:
    if not isinstance(ids, np.ndarray):
        ids = np.array(ids if isinstance(ids, (list, tuple)) else list(ids), dtype=np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise TokenError(f"text ids must be a flat array of integers, got {ids.dtype} of shape {ids.shape}")
    codes: Codes = ids.astype(np.int64, copy=False)
    if len(codes) and (lowest := int(codes.min())) < 0:
        raise TokenError(f"token id must be in 0..2**63-1, got {lowest}")
    return codes


TokensLike: TypeAlias = CacheTokens | NDArray[np.integer] | Iterable[CacheToken | int]


def as_tokens(tokens: TokensLike) -> CacheTokens:
    """Convert to `CacheTokens`. A `CacheTokens` is returned unchanged."""
    if isinstance(tokens, CacheTokens):
        return tokens
    if isinstance(tokens, np.ndarray):
        return CacheTokens.from_text(tokens)
    tokens = list(tokens)
    if set(map(type, tokens)) == {int}:
        return CacheTokens.from_text(cast(list[int], tokens))
    return CacheTokens.from_tokens(tokens)


def kept_tokens(tokens: TokensLike) -> CacheTokens:
    """`as_tokens` for callers that store the codes: copies an array, since its owner may modify it."""
    return as_tokens(tokens.copy() if isinstance(tokens, np.ndarray) else tokens)
