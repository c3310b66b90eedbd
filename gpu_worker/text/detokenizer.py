"""Incremental detokenization, at a cost per token that does not depend on the length of the output.

The text so far equals the decoded output, except for the bytes of an incomplete character. These are held back
until the character is complete, or until `flush` (or a byte that cannot continue it) turns them into U+FFFD.
The constructor is told which special tokens yield no text, and which tokens stand `before` the output, if any:
some decoders drop a space at the beginning of a text, but not after other text.

There is one difference from decoding all tokens at once. For a run of byte-fallback tokens that is not valid
UTF-8, the library replaces every byte of the run, also those of valid characters. Here valid characters stay,
because they have been delivered already, and only invalid bytes are replaced."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

from petiole.gpu_worker.text.pieces import TokenPieces

_new_decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    def push(self, token_ids: Iterable[int]) -> str:
        """Append tokens and return the text that they complete."""

    def flush(self) -> str:
        """Return the text held back. Nothing may be pushed afterwards."""


class PieceDetokenizer:
    """For decoders whose text is a concatenation of token bytes."""

    __slots__ = ("_decoder", "_pieces", "_started", "_strip", "_table")

    def __init__(self, table: TokenPieces, *, before: Sequence[int] = ()) -> None:
        self._table = table
        self._pieces = table.pieces
        self._decoder = _new_decoder("replace")
        begun = any(v < len(table.pieces) and table.pieces[v] for v in before)
        self._strip = 0 if begun else table.strip
        self._started = begun or table.first is None

    def push(self, token_ids: Iterable[int]) -> str:
        pieces, size = self._pieces, len(self._pieces)
        data = [pieces[v] for v in token_ids if v < size] if self._started else self._start(token_ids)
        text = self._decoder.decode(b"".join(data))
        return self._stripped(text) if self._strip else text

    def flush(self) -> str:
        text = self._decoder.decode(b"", final=True)
        return self._stripped(text) if self._strip else text

    def _start(self, token_ids: Iterable[int]) -> Sequence[bytes]:
        """Metaspace: the first token with text has another text than it has elsewhere."""
        first = self._table.first or {}
        data = []
        for v in token_ids:
            if self._started:
                data.append(self._pieces[v] if v < len(self._pieces) else b"")
            elif v in first:
                data.append(first[v])
                self._started = True
        return data

    def _stripped(self, text: str) -> str:
        """Drop the leading spaces that are still to be dropped. The first other letter ends the dropping."""
        kept = text
        while self._strip and kept:
            if kept[0] != " ":
                self._strip = 0
            else:
                kept, self._strip = kept[1:], self._strip - 1
        return kept


class LibraryDetokenizer:
    """For any other decoder: the library's own stream decoder. It has no end, so `flush` decodes the whole output
    once. It stops where earlier text would change; all text after that point waits for `flush`."""

    __slots__ = ("_backend", "_hidden", "_ids", "_seen", "_stream")

    def __init__(
        self, backend: tokenizers.Tokenizer, *, hidden: Collection[int] = (), before: Sequence[int] = ()
    ) -> None:
        self._backend, self._hidden = backend, hidden
        self._ids = [v for v in before if v not in hidden]
        self._stream: DecodeStream | None = DecodeStream(ids=list(self._ids), skip_special_tokens=False)
        self._seen = len(self._whole())

    def push(self, token_ids: Iterable[int]) -> str:
        text = "".join([self._step(v) for v in token_ids if v not in self._hidden])
        self._seen += len(text)
        return text

    def _step(self, token_id: int) -> str:
        self._ids.append(token_id)
        if self._stream is None:
            return ""
        try:
            return self._stream.step(self._backend, token_id) or ""
        except Exception:  # the library raises nothing narrower
            self._stream = None
            return ""

    def flush(self) -> str:
        return self._whole()[self._seen :]

    def _whole(self) -> str:
        text: str = self._backend.decode(self._ids, skip_special_tokens=False)
        return text
