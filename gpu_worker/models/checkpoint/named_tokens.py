"""Tokens by their texts, for models that see: their configurations do not number what stands between the parts
of a picture."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_BYTES, MAX_JSON, read_json, shown

_NUMBER = re.compile("[0-9]{1,9}")


@dataclass(frozen=True)
class NamedTokens:
    """The tokens of a folder. Each method raises ModelError for a file that cannot be read."""

    folder: Path

    def of(self, text: str, key: str | None = None) -> int:
        """The id of a token. key: in processor_config.json, which may give it another text. Raises ModelError for
        a token that the tokenizer lacks."""
        text = self._processor.get(key, text) if key is not None else text
        found = self.find(text) if isinstance(text, str) else None
        if found is None:
            raise ModelError(
                f"{self.folder / 'tokenizer.json'}: must have the token {shown(text)}, which is missing"
            )
        return found

    def find(self, text: str) -> int | None:
        """The id of a token as tokenizer.json spells it; None if there is none."""
        found = self._added.get(text)
        return self._vocabulary.get(text) if found is None else found

    @cached_property
    def _processor(self) -> dict[str, Any]:
        return self._read("processor_config.json")

    @cached_property
    def _added(self) -> dict[str, int]:
        """As tokenizer_config.json has them, which is small."""
        given = self._read("tokenizer_config.json").get("added_tokens_decoder")
        entries = given.items() if isinstance(given, Mapping) else ()
        return _ids((_text(entry), int(key) if _NUMBER.fullmatch(key) else None) for key, entry in entries)

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        read = self._read("tokenizer.json", MAX_BYTES)
        model, added = read.get("model"), read.get("added_tokens")
        vocab = model.get("vocab") if isinstance(model, Mapping) else None
        numbered: Iterable[tuple[object, object]] = vocab.items() if isinstance(vocab, Mapping) else ()
        if isinstance(vocab, list):  # of texts and scores: Unigram
            numbered = [(one[0], k) for k, one in enumerate(vocab) if isinstance(one, list) and one]
        found = _ids(numbered)
        entries = [one for one in added if isinstance(one, Mapping)] if isinstance(added, list) else []
        return found | _ids((_text(entry), entry.get("id")) for entry in entries)

    def _read(self, name: str, most: int = MAX_JSON) -> dict[str, Any]:
        path = self.folder / name
        return read_json(path, most) if path.is_file() else {}


def _ids(entries: Iterable[tuple[object, object]]) -> dict[str, int]:
    """The entries whose text and id can be a token's."""
    return {text: id_ for text, id_ in entries if isinstance(text, str) and type(id_) is int and id_ >= 0}


def _text(entry: object) -> object:
    return entry.get("content") if isinstance(entry, Mapping) else None
