"""Tokens by their texts, for models that see: their configurations do not number what stands between the parts
of a picture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import read_json, shown


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
        return {
            entry["content"]: int(number)
            for number, entry in entries
            if isinstance(entry, Mapping) and isinstance(entry.get("content"), str) and number.isdecimal()
        }

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        read = self._read("tokenizer.json")
        model, added = read.get("model"), read.get("added_tokens")
        vocab = model.get("vocab") if isinstance(model, Mapping) else None
        found = (
            {text: id_ for text, id_ in vocab.items() if type(id_) is int} if isinstance(vocab, Mapping) else {}
        )
        entries = added if isinstance(added, list) else []
        return found | {
            entry["content"]: entry["id"]
            for entry in entries
            if isinstance(entry, Mapping)
            and isinstance(entry.get("content"), str)
            and type(entry.get("id")) is int
        }

    def _read(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return read_json(path) if path.is_file() else {}
