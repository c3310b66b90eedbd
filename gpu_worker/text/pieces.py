"""The bytes that each token contributes to the text.

Decoding with `tokenizers` takes time linear in the sequence, too slow to repeat for every token of a stream. For
the decoders of the supported families, the text is the concatenation of per-token bytes, decoded as UTF-8, with at
most a special rule for the beginning:

    ByteLevel                                            GPT-2, Llama 3, Qwen, Mistral's Tekken
    Replace("▁", " "), ByteFallback, Fuse[, Strip]       Llama 2, Mistral, Gemma; Strip: one leading space goes
    Metaspace                                            the first token loses its "▁"

`token_pieces` builds that table from the decoder's description, or returns None for an unknown decoder; the
detokenizer then uses the library.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class TokenPieces:
    """`pieces[v]`: the bytes of token v, empty for ids without a token.

    `strip`: the number of leading spaces to remove from the text. `first`: for Metaspace, the bytes of token v as
    the first token of a text; None otherwise.
    """

    pieces: Sequence[bytes]
    strip: int = 0
    first: Mapping[int, bytes] | None = None

    def without(self, token_ids: Collection[int]) -> TokenPieces:
        """The same table, but these tokens yield no text."""
        pieces = list(self.pieces)
        for v in token_ids:
            pieces[v] = b""
        first = self.first and {v: piece for v, piece in self.first.items() if v not in token_ids}
        return TokenPieces(pieces, self.strip, first)


def token_pieces(decoder: Mapping[str, Any] | None, tokens: Sequence[str | None]) -> TokenPieces | None:
    """The table for the decoder that `tokenizer.json` describes. `tokens[v]` is None if no token has id v."""
    match decoder:
        case {"type": "ByteLevel"}:
            return TokenPieces(_byte_level(tokens))
        case {"type": "Metaspace", "replacement": str(mark), **rest}:
            return _metaspace(tokens, mark, keeps_first=rest.get("prepend_scheme", "always") == "never")
        case {"type": "Sequence", "decoders": [one]}:
            return token_pieces(one, tokens)
        case {"type": "Sequence", "decoders": list(steps)}:
            return _byte_fallback(steps, tokens)
    return None


def _byte_fallback(steps: Sequence[Mapping[str, Any]], tokens: Sequence[str | None]) -> TokenPieces | None:
    match steps:
        case [
            {"type": "Replace", "pattern": {"String": str(mark)}, "content": str(space)},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *end,
        ]:
            pass
        case _:
            return None
    match end:
        case []:
            strip = 0
        case [{"type": "Strip", "content": " ", "start": int(strip), "stop": 0}]:
            pass
        case _:
            return None

    texts = ["" if token is None else token.replace(mark, space) for token in tokens]
    pieces = [text.encode() for text in texts]
    for i, text in enumerate(texts):
        if text.startswith("<0x") and (byte := _BYTE_TOKEN.fullmatch(text)):
            pieces[i] = bytes([int(byte[1], 16)])
    return TokenPieces(pieces, strip=strip)


def _metaspace(tokens: Sequence[str | None], mark: str, *, keeps_first: bool) -> TokenPieces:
    pieces = [b"" if token is None else token.replace(mark, " ").encode() for token in tokens]
    if keeps_first:
        return TokenPieces(pieces)
    first = {v: token.replace(mark, "").encode() for v, token in enumerate(tokens) if token is not None}
    return TokenPieces(pieces, first=first)


def _byte_level(tokens: Sequence[str | None]) -> list[bytes]:
    """The bytes of tokens in byte-level letters. A token with other letters (an added token) is plain text."""
    texts = ["" if token is None else token for token in tokens]
    letters = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
    numbers = _BYTES[np.minimum(letters, len(_BYTES) - 1)]
    whole, ends = numbers.astype(np.uint8).tobytes(), np.cumsum(list(map(len, texts)), dtype=np.int64)
    pieces = [whole[start:end] for start, end in pairwise([0, *ends.tolist()])]
    for i in set(np.searchsorted(ends, np.flatnonzero(numbers == _NO_BYTE), "right").tolist()):
        pieces[i] = texts[i].encode()
    return pieces


def _byte_letters() -> npt.NDArray[np.uint16]:
    """GPT-2's byte alphabet, from letters to bytes: printable Latin-1 maps to itself, U+0100 and up to the other
    bytes, in order. All other letters are none of it: the last entry stands for those beyond the table."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in plain]
    own = [byte if byte in plain else _NO_BYTE for byte in range(256)]
    return np.array([*own, *others, _NO_BYTE], np.uint16)


_NO_BYTE = 256
_BYTES = _byte_letters()
