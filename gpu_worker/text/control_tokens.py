"""Control tokens that somebody has written out in a message.

A control token ends or frames a turn: a special token of the tokenizer, or another added token with which the chat
template frames turns. (Not every added token is one: Qwen's `<tool_call>` is ordinary.) In what users say and what
tools return, the text of a control token is ordinary text. So nobody ends a turn, or begins one, from inside a
message.

The prompt is still encoded as a whole, because encoding contents apart would change the ids of most prompts:

1. A placeholder of letters and digits replaces each occurrence before the template renders the messages.
2. The library encodes the rendered text. This finds the template's own tokens.
3. The stretch around a placeholder, up to the next added token on either side, is encoded again: with the text of
   the control token back in its place, and without looking for added tokens.

A prompt without such text needs none of this, and has the ids that it always had."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import groupby
from os.path import commonprefix
from typing import Any

import tokenizers

from petiole.gpu_worker.exceptions import InvalidRequest

TRUSTED_ROLES = frozenset({"assistant", "developer", "system"})
"""Control tokens in these roles' messages stay control tokens: an application writes them, or the model did."""
_STEM = "ControlTokenInContent"
_MOST_NESTED = 20


class ControlTokens:
    """The control tokens of a tokenizer, by their texts. Immutable."""

    def __init__(self, backend: tokenizers.Tokenizer, texts: Collection[str]) -> None:
        self.backend = backend
        unknown = getattr(backend.model, "unk_token", None)  # the model's own answer to any text
        self.ids = frozenset(backend.token_to_id(text) for text in texts if text != unknown)
        self.added_ids = frozenset(backend.get_added_tokens_decoder())
        self.pattern = re.compile(_longest_of(sorted(texts)) or "(?!)")

    def in_content(self) -> ContentTokens:
        return ContentTokens(self)

    def encode_as_text(self, text: str) -> list[int]:
        """The token ids of a text in which no added token is looked for."""
        backend = self.backend
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        words = [text] if backend.pre_tokenizer is None else _words(backend.pre_tokenizer, text)
        return [token_id for word in words for token_id in self._ids_of(word)]

    def _ids_of(self, word: str) -> Sequence[int]:
        ids = [token.id for token in self.backend.model.tokenize(word)]
        if len(word) == 1 or self.ids.isdisjoint(ids):
            return ids
        half = len(word) // 2  # the model has the control token in its own vocabulary, too
        return [*self._ids_of(word[:half]), *self._ids_of(word[half:])]


class ContentTokens:
    """The control tokens in the contents of one conversation: `hide` them before it is rendered, then `encode`."""

    def __init__(self, known: ControlTokens) -> None:
        self._known = known
        self._stem = _STEM
        self._hidden: list[str] = []

    def hide(self, chat: Sequence[dict[str, Any]]) -> None:
        """Replace the control tokens in what users and tools say: in every field but `role`, since a template may
        write a name, too. Changes `chat`, which is plain data."""
        fields = [
            (message, key)
            for message in chat
            if message["role"] not in TRUSTED_ROLES
            for key in message
            if key != "role"
        ]
        if not any(self._known.pattern.search(text) for one, key in fields for text in _texts(one[key])):
            return
        written = json.dumps(chat, ensure_ascii=False)
        longest = max((len(found) for found in re.findall(f"{_STEM}(x*)", written, re.IGNORECASE)), default=-1)
        self._stem += "x" * (longest + 1)  # so it is not in the conversation
        for message, key in fields:
            message[key] = self._replaced(message[key])

    def encode(self, rendered: str) -> list[int] | None:
        """The token ids of the rendered conversation; None if nothing was hidden. Raises InvalidRequest if the
        template has changed a placeholder."""
        if not self._hidden:
            return None
        placeholder = re.compile(rf"{self._stem}(\d+)e")
        whole = sum(1 for _ in placeholder.finditer(rendered))
        if whole != len(re.findall(self._stem, rendered, re.IGNORECASE)):
            limit = "must have no control token in a text that the chat template changes"
            raise InvalidRequest("messages", limit, ", ".join(sorted(set(self._hidden))))
        encoding = self._known.backend.encode(rendered, add_special_tokens=False)
        ids: list[int] = []
        for stretch, start, end in self._stretches(encoding.ids, encoding.offsets, len(rendered)):
            text = rendered[start:end]
            if placeholder.search(text):
                ids += self._known.encode_as_text(placeholder.sub(lambda at: self._hidden[int(at[1])], text))
            else:
                ids += stretch
        return ids

    def _stretches(
        self, ids: Sequence[int], offsets: Sequence[tuple[int, int]], length: int
    ) -> Iterator[tuple[Sequence[int], int, int]]:
        """The tokens, and the text from start to end, between two added tokens; and each added token."""
        first, begin = 0, 0
        for at, (token_id, (start, end)) in enumerate(zip(ids, offsets, strict=True)):
            if token_id in self._known.added_ids:
                yield ids[first:at], begin, start
                yield ids[at : at + 1], start, end
                first, begin = at + 1, end
        yield ids[first:], begin, length

    def _replaced(self, content: Any) -> Any:
        match content:
            case str():
                return self._known.pattern.sub(self._hide_one, content)
            case list():
                return [self._replaced(part) for part in content]
            case dict():
                return {key: self._replaced(value) for key, value in content.items()}
        return content

    def _hide_one(self, found: re.Match[str]) -> str:
        self._hidden.append(found[0])
        return f"{self._stem}{len(self._hidden) - 1}e"


def _longest_of(texts: Sequence[str], depth: int = 0) -> str:
    """A regular expression for the longest of these sorted texts. What several begin with stands once, since a
    model may have 100,000 such tokens."""
    if depth == _MOST_NESTED:
        return "|".join(map(re.escape, sorted(texts, key=lambda text: (-len(text), text))))
    found = []
    for _, beginning in groupby(texts, key=lambda text: text[:1]):
        group = list(beginning)
        shared = commonprefix([group[0], group[-1]])  # noqa: RUF071 - of letters is meant
        rest = f"(?:{_longest_of([text[len(shared) :] for text in group], depth + 1)})" if len(group) > 1 else ""
        found.append(re.escape(shared) + rest)
    return "|".join(found[::-1])  # an empty rest comes last


def _texts(content: Any) -> Iterator[str]:
    match content:
        case str():
            yield content
        case list():
            for part in content:
                yield from _texts(part)
        case dict():
            for value in content.values():
                yield from _texts(value)


def _words(pre_tokenizer: Any, text: str) -> list[str]:
    return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]
