"""Cache tokens: what a KV position was computed from, as one int64 a position.

The idea: a sequence is a numpy array of *codes* with exactly one code for each KV position, so that a token
offset in the array is a page offset in the row and comparing two prompts is comparing two arrays.

    code >= 0                       a text token: the code is its id
    code <  0   kind 1              a coordinate: its bin
                kind 2              a size: both bins
                kind 3              one position of an image: serial of the image, offset inside it

An image takes as many codes as KV positions; the offset says where it begins, so whether a cut would split it
is one look at one code.  Its 128-bit content hash does not fit into a code: each distinct (hash, length) that
is alive gets a serial number that is never used again, and whoever keeps codes of an image also keeps its
`ImageIdentity`, which keeps the serial alive.  So equal codes mean equal content, with no second comparison.

The typed tokens are the convenient way in; `cache_key()` and `kv_length()` are what they contribute.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias, cast
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from cache.errors import MisalignedError, TokenError

Codes: TypeAlias = NDArray[np.int64]

_COORD, _SIZE, _IMAGE = 1, 2, 3
_BASE = -(1 << 63)
_KIND_SHIFT = 60
_BIN_BITS = 30
_OFFSET_BITS = 24
_OFFSET_MASK = (1 << _OFFSET_BITS) - 1
_FIRST_IMAGE_CODE = _BASE + (_IMAGE << _KIND_SHIFT)


class TextToken(NamedTuple):
    """A token of the vocabulary."""

    token_id: int

    def cache_key(self) -> tuple[int, ...]:
        return (0, self.token_id)

    def kv_length(self) -> int:
        return 1


class CoordToken(NamedTuple):
    """A coordinate; `pos` is for the embedding, `bin` is its identity."""

    pos: float
    bin: int

    def cache_key(self) -> tuple[int, ...]:
        return (1, self.bin)

    def kv_length(self) -> int:
        return 1


class SizeToken(NamedTuple):
    """A size; the floats are for the embedding, the bins are its identity."""

    width: float
    height: float
    width_bin: int
    height_bin: int

    def cache_key(self) -> tuple[int, ...]:
        return (2, self.width_bin, self.height_bin)

    def kv_length(self) -> int:
        return 1


class ImageToken(NamedTuple):
    """A whole image: a 128-bit content hash and the number of KV positions that it takes."""

    content_hash: int
    kv_length_: int

    def cache_key(self) -> tuple[int, ...]:
        return (3, self.content_hash, self.kv_length_)

    def kv_length(self) -> int:
        return self.kv_length_


CacheToken: TypeAlias = TextToken | CoordToken | SizeToken | ImageToken


class ImageIdentity:
    """The serial of one distinct image for as long as somebody keeps codes with it."""

    __slots__ = ("__weakref__", "content_hash", "kv_length", "serial")

    def __init__(self, content_hash: int, kv_length: int, serial: int) -> None:
        self.content_hash = content_hash
        self.kv_length = kv_length
        self.serial = serial


class _ImageRegistry:
    """Serials of the images that are alive.  Preparation threads call it, hence the lock."""

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


def _single_code(token: TextToken | CoordToken | SizeToken) -> int:
    if isinstance(token, TextToken):
        return _check_text(token.token_id)
    if isinstance(token, CoordToken):
        return _BASE + (_COORD << _KIND_SHIFT) + _check_bin("bin", token.bin)
    width, height = _check_bin("width_bin", token.width_bin), _check_bin("height_bin", token.height_bin)
    return _BASE + (_SIZE << _KIND_SHIFT) + (width << _BIN_BITS) + height


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
    """How many leading positions of a prompt may come from a cache: whole pages, and its last token never."""
    return page_boundary(codes, boundary(codes, max(len(codes) - 1, 0)), page_size)


class CacheTokens:
    """A growing sequence of cache tokens: codes, and the identities of the images among them.

    `len()` counts tokens, `kv_length` counts KV positions (they differ where there are images).  Appending is
    amortised O(1), so an engine keeps one for prompt and output and appends what it commits.  What is in it never
    changes, so others may share its memory.
    """

    __slots__ = ("_buffer", "_images", "_kv_length")

    def __init__(self, codes: Codes | None = None, images: tuple[ImageIdentity, ...] = ()) -> None:
        self._buffer: Codes = np.empty(0, dtype=np.int64) if codes is None else codes
        self._kv_length = len(self._buffer)
        self._images = images

    @classmethod
    def from_text(cls, ids: NDArray[np.integer] | Iterable[int]) -> CacheTokens:
        """Text ids; an int64 array is taken as it is, without a copy (do not write to it afterwards)."""
        return cls(_text_codes(ids))

    @classmethod
    def from_tokens(cls, tokens: Iterable[CacheToken | int]) -> CacheTokens:
        """Typed tokens (plain integers are text)."""
        result = cls()
        pending: list[int] = []
        for token in tokens:
            if isinstance(token, ImageToken):
                identity = _images.identity(token)
                result._grow(np.array(pending, dtype=np.int64))
                result._grow(_image_codes(identity))
                result._images += (identity,)
                pending.clear()
            elif isinstance(token, (TextToken, CoordToken, SizeToken)):
                pending.append(_single_code(token))
            else:
                pending.append(_check_text(int(token)))
        result._grow(np.array(pending, dtype=np.int64))
        return result

    @property
    def codes(self) -> Codes:
        """One code for each KV position: int64 [kv_length], a view."""
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
            identity = _images.identity(token)
            self._grow(_image_codes(identity))
            self._images += (identity,)
            return
        code = (
            _single_code(token)
            if isinstance(token, (TextToken, CoordToken, SizeToken))
            else _check_text(int(token))
        )
        if self._kv_length == len(self._buffer):
            self._enlarge(self._kv_length + 1)
        self._buffer[self._kv_length] = code
        self._kv_length += 1

    def extend(self, tokens: CacheTokens | NDArray[np.integer] | Iterable[CacheToken | int]) -> None:
        other = as_tokens(tokens)
        self._grow(other.codes)
        self._images += other.images

    def prefix(self, kv_length: int) -> CacheTokens:
        """The tokens of the first `kv_length` positions, sharing memory.  Splitting an image is an error."""
        if not 0 <= kv_length <= self._kv_length:
            raise MisalignedError(f"prefix of {kv_length} positions asked of {self._kv_length}")
        if self._images and boundary(self.codes, kv_length) != kv_length:
            raise MisalignedError(f"position {kv_length} lies inside an image")
        return CacheTokens(self._buffer[:kv_length], self._images)

    def suffix(self, kv_start: int) -> CacheTokens:
        """The tokens from position `kv_start` on, sharing memory."""
        return CacheTokens(self.codes[kv_start:], self._images)

    def token_index(self, kv: int) -> int:
        """How many tokens the first `kv` positions hold."""
        if not self._images:
            return kv
        codes = self._buffer[:kv]
        return kv - int(np.count_nonzero((codes < 0) & (codes >= _FIRST_IMAGE_CODE) & (codes & _OFFSET_MASK != 0)))

    def kv_offset(self, token_index: int) -> int:
        """How many positions the first `token_index` tokens take."""
        if not self._images:
            return min(token_index, self._kv_length)
        codes = self.codes
        first = (codes >= 0) | (codes < _FIRST_IMAGE_CODE) | (codes & _OFFSET_MASK == 0)
        starts = np.flatnonzero(first)
        return int(starts[token_index]) if token_index < len(starts) else self._kv_length

    def cache_keys(self) -> list[tuple[int, ...]]:
        """The keys of the tokens, for tests and people: one tuple a token."""
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
    """Anything that names a sequence of tokens; a `CacheTokens` comes back as it is."""
    if isinstance(tokens, CacheTokens):
        return tokens
    if isinstance(tokens, np.ndarray):
        return CacheTokens.from_text(tokens)
    tokens = list(tokens)
    if set(map(type, tokens)) == {int}:
        return CacheTokens.from_text(cast(list[int], tokens))
    return CacheTokens.from_tokens(tokens)


def kept_tokens(tokens: TokensLike) -> CacheTokens:
    """`as_tokens` for somebody who keeps the codes: a bare array, which its owner may write to, is copied."""
    return as_tokens(tokens.copy() if isinstance(tokens, np.ndarray) else tokens)
