"""The tokenizer of a checkpoint, over the `tokenizers` library.

Everything here is read-only after construction, so preparation threads can share it. The library encodes without
the interpreter lock.

As in `transformers`, a prompt gets the special tokens that the checkpoint's post-processor adds (BOS for Llama,
none for Qwen), while a rendered chat template gets none, because it has its own. Special tokens that are written
out in a prompt become control tokens. In a conversation, `control` decides."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import tokenizers

from petiole.contract.limits import Truncate
from petiole.gpu_worker.exceptions import InvalidRequest, ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_VOCAB
from petiole.gpu_worker.request.requests import check_text
from petiole.gpu_worker.text.chat import ChatTemplate
from petiole.gpu_worker.text.control_tokens import ControlTokens
from petiole.gpu_worker.text.detokenizer import Detokenizer, LibraryDetokenizer, PieceDetokenizer
from petiole.gpu_worker.text.foreign._tokenizer_process import MAX_ADDED_TOKENS, MAX_PIECE
from petiole.gpu_worker.text.pieces import TokenPieces, token_pieces

_CHARACTERS_PER_TOKEN = 8
_MOST_MISSING = 2**18
_SURELY = 256  # more tokens than a cut in the text can change


class Tokenizer:
    """Text to token ids and back.

    `special_tokens`: the tokens by role ("bos_token": "<s>", ...), as templates know them.
    `eos_token_ids`: the ids that end an output; by default the id of "eos_token".
    `chat_templates`: jinja2 sources by name; "default" is used, or "tool_use" where tools are given.
    `control_tokens`: texts of added tokens that are control tokens beside the special ones; by default those that
    frame turns in the chat templates.
    `described`: what the checkpoint says of the form of its outputs ("response_template", "tool_format").
    `vocab`: of the backend, with added tokens, for a caller that has it: the library takes long to list it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, Any] | None = None,
        eos_token_ids: Iterable[int] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        control_tokens: Collection[str] | None = None,
        described: Mapping[str, Any] | None = None,
        vocab: Mapping[str, int] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        if isinstance(backend.model, tokenizers.models.BPE):
            backend.model.dropout = None  # for training: the same text would have other tokens each time
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        # One more than the largest token id; the model's own vocabulary may be padded beyond it.
        vocab = backend.get_vocab(with_added_tokens=True) if vocab is None else vocab
        self.vocab_size: int = max(vocab.values(), default=-1) + 1
        if self.vocab_size > MAX_VOCAB:
            limit = f"must have token ids from 0 to {MAX_VOCAB - 1}"
            raise ModelError(f"tokenizer.json: model.vocab and added_tokens {limit}, got {self.vocab_size - 1}")
        if (missing := self.vocab_size - len(vocab)) > _MOST_MISSING:  # each takes time and memory
            limit = f"must have at most {_MOST_MISSING} unused ids below the largest"
            raise ModelError(f"tokenizer.json: model.vocab and added_tokens {limit}, got {missing}")
        # Control tokens: no text stands for them in an output, unless a request wants to see them.
        added = backend.get_added_tokens_decoder()
        if len(added) > MAX_ADDED_TOKENS:
            raise ModelError(f"tokenizer.json: added_tokens must be at most {MAX_ADDED_TOKENS}, got {len(added)}")
        if (longest := max(map(len, vocab), default=0)) > MAX_PIECE:
            raise ModelError(f"tokenizer.json: tokens must have at most {MAX_PIECE} letters, got {longest}")
        self.special_token_ids = frozenset(v for v, token in added.items() if token.special)
        eos = self.special_tokens.get("eos_token")
        eos_id = None if eos is None else backend.token_to_id(eos)
        own_eos = frozenset() if eos_id is None else frozenset([eos_id])
        self.eos_token_ids: frozenset[int] = own_eos if eos_token_ids is None else frozenset(eos_token_ids)
        self.chat_template = ChatTemplate(chat_templates or {}, self.special_tokens)
        framing = self.chat_template.framed_turns() if control_tokens is None else control_tokens
        texts = {token.content for token in added.values() if token.special or _frames(token.content, framing)}
        self.control = ControlTokens(backend, texts)
        self._described = dict(described or {})
        self._pieces = self._token_pieces(vocab, {v: token.content for v, token in added.items()})
        self._tables: dict[frozenset[int], TokenPieces] = {}  # by hidden tokens; of which a model has a few sets
        if self._pieces is not None and self.special_token_ids:
            self._tables[self.special_token_ids] = self._pieces.without(self.special_token_ids)

    def encode(
        self, text: str, *, field: str = "prompt", add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """The token ids of a text. Raises InvalidRequest, naming `field`, if it is not Unicode text, or has more
        than `max_tokens` tokens. A text of megabytes that cannot fit is refused without tokenizing it."""
        check_text(field, text)
        if max_tokens is not None:
            self.check_length(field, text, max_tokens)
        ids = list(self.encoding(text, field=field, add_special_tokens=add_special_tokens).ids)
        return self.of_length(field, ids, max_tokens)

    def encoding(self, text: str, *, field: str, add_special_tokens: bool = False) -> tokenizers.Encoding:
        """What the library knows of a text's tokens. Raises InvalidRequest, naming `field`, for a text that this
        tokenizer cannot encode: mostly one with a letter that is not in its vocabulary, which has no unknown token
        either."""
        with _refusing(field):
            return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def encode_cut(
        self,
        text: str,
        *,
        field: str,
        max_tokens: int,
        where: Truncate = "end",
        add_special_tokens: bool = True,
    ) -> list[int]:
        """`encode`, but a text that is too long is cut there: the special tokens at both its ends stay."""
        check_text(field, text)
        encoded = self.encoding(text, field=field, add_special_tokens=add_special_tokens)
        ids, special = list(encoded.ids), encoded.special_tokens_mask
        if len(ids) <= max_tokens:
            return ids
        head = next((n for n, one in enumerate(special) if not one), 0)
        tail = next((n for n, one in enumerate(reversed(special)) if not one), 0)
        own = ids[head : len(ids) - tail]
        return ids[:head] + cut(own, max(0, max_tokens - head - tail), where) + ids[len(ids) - tail :]

    def encode_as_text(self, text: str, *, field: str, max_tokens: int | None = None) -> list[int]:
        """`encode` without special tokens, and with control tokens that are written out as text."""
        check_text(field, text)
        if self.control.pattern.search(text) is None:
            return self.encode(text, field=field, add_special_tokens=False, max_tokens=max_tokens)
        if max_tokens is not None:
            self.check_length(field, text, max_tokens)
        with _refusing(field):
            return self.of_length(field, self.control.encode_as_text(text), max_tokens)

    def decode(self, token_ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def entry(self, token_id: int) -> str:
        """How the vocabulary writes a token ("Ġthe", "▁the"); empty for one that it lacks."""
        return (self.backend.id_to_token(token_id) if token_id >= 0 else None) or ""

    def text_of(self, token_id: int) -> str:
        """How a special token is written. Raises ModelError for a token that the tokenizer lacks."""
        if found := self.entry(token_id):
            return found
        raise ModelError(f"tokenizer.json: must have the token {token_id}, which config.json names")

    def token_bytes(self, token_id: int) -> bytes:
        """What the token contributes to the text, special tokens included. It may be a part of a character."""
        if self._pieces is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        pieces = self._pieces.pieces
        return pieces[token_id] if token_id < len(pieces) else b""  # a model may have more tokens

    def detokenizer(
        self, *, skip_special_tokens: bool = True, shown: Collection[str] = (), before: Sequence[int] = ()
    ) -> Detokenizer:
        """A new incremental decoder; see `TextAssembler`."""
        hidden = self._hidden(frozenset(shown)) if skip_special_tokens else frozenset()
        if self._pieces is None:
            return LibraryDetokenizer(self.backend, hidden=hidden, before=before)
        table = self._pieces
        if hidden:
            table = self._tables.get(hidden) or self._tables.setdefault(hidden, table.without(hidden))
        return PieceDetokenizer(table, before=before)

    def text_lengths(
        self, token_ids: Sequence[int], *, skip_special_tokens: bool = True, shown: Collection[str] = ()
    ) -> list[int]:
        """For each token: how many characters an output has that ends with it."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens, shown=shown)
        length, lengths = 0, []
        for token in token_ids:
            length += len(detokenizer.push((token,)))
            lengths.append(length)
        return lengths

    def _hidden(self, shown: frozenset[str]) -> frozenset[int]:
        """The special tokens that yield no text."""
        if not shown:
            return self.special_token_ids
        return self.special_token_ids - {self.backend.token_to_id(text) for text in shown}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_tokens: int | None = None,
        content_is_text: bool = True,
        rewrite: Callable[[str], str] = str,
    ) -> list[int]:
        """The prompt of a conversation: see `ChatTemplate.render`; `max_tokens` as for `encode`.

        `content_is_text`: control tokens that are written out in the content of users and tools are text; see
        `control`. rewrite: of the text before it becomes tokens. Raises InvalidRequest, whose field is mostly
        "messages".
        """
        content = self.control.in_content()
        text = self.chat_template.render(
            messages,
            tools,
            variables,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            hide=content.hide if content_is_text else None,
        )
        text = rewrite(text)
        with _refusing("messages"):
            ids = content.encode(text)
        if ids is not None:
            return self.of_length("messages", ids, max_tokens)
        return self.encode(text, field="messages", add_special_tokens=False, max_tokens=max_tokens)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What the checkpoint says of its conversations and of its special tokens, by the names of
        `Engine.facts`."""
        template, backend = self.chat_template, self.backend
        special = {str(token): backend.id_to_token(token) for token in sorted(self.special_token_ids)}
        return {
            "chat": template.known,
            "tools": template.shows_tools(),
            "reasoning": template.knows_reasoning(),
            "special_tokens": special,
            "chat_template": template.source,
            **self._described,
        }

    @staticmethod
    def of_length(field: str, ids: list[int], max_tokens: int | None) -> list[int]:
        """The token ids of a text. Raises InvalidRequest, naming `field`, if they are too many."""
        if max_tokens is not None and len(ids) > max_tokens:
            raise InvalidRequest(field, f"must have at most {max_tokens} tokens", f"{len(ids)} tokens")
        return ids

    def check_length(self, field: str, text: str, max_tokens: int) -> None:
        """Check the length of a text of megabytes by its beginning, without encoding all of it. Except for a few
        tokens at the cut, the beginning has as many tokens alone as in the whole text, because a token depends
        only on the text around it. Raises InvalidRequest, naming `field`."""
        beginning = text[: _CHARACTERS_PER_TOKEN * max_tokens + _SURELY]
        if len(beginning) < len(text):
            count = len(self.encoding(beginning, field=field).ids)
            if count > max_tokens + _SURELY:
                limit = f"must have at most {max_tokens} tokens"
                raise InvalidRequest(
                    field, limit, f"{count} in the first {len(beginning)} of {len(text)} characters"
                )

    def _token_pieces(self, vocab: Mapping[str, int], added: dict[int, str]) -> TokenPieces | None:
        """added: of several tokens with one id, this is its text."""
        of_ids = {v: token for token, v in vocab.items()} | added
        tokens = [of_ids.get(v) for v in range(self.vocab_size)]
        decoder = self.backend.decoder
        # A decoder pickles as its description in tokenizer.json, without the megabytes of the rest.
        return token_pieces(None if decoder is None else json.loads(decoder.__getstate__()), tokens)


@contextmanager
def _refusing(field: str) -> Iterator[None]:
    """Errors of the library as InvalidRequest. It raises nothing narrower than Exception, and its panic is not
    even one."""
    try:
        yield
    except (InvalidRequest, MemoryError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        said, where = " ".join(str(error).split())[:200], "tokenizer.json"
        if "unk" in said.lower():
            where += ": model.unk_id" if "unk_id" in said else ": model.unk_token"
        raise InvalidRequest(
            field, f"must be text that the model's tokenizer can encode ({where})", said
        ) from error


def kept(most: int, where: Truncate) -> tuple[int, int]:
    """How many tokens of the beginning, and how many of the end, stay."""
    last = {"start": most, "middle": most // 2, "end": 0}[where]
    return most - last, last


def cut(token_ids: list[int], most: int, where: Truncate) -> list[int]:
    """At most this many tokens of a text."""
    if len(token_ids) <= most:
        return token_ids
    first, last = kept(most, where)
    return token_ids[:first] + token_ids[len(token_ids) - last :]


def _frames(text: str, framing: str | Collection[str]) -> bool:
    """Whether an added token is among the control tokens, or in the template's text around turns. Whitespace, such
    as Gemma's line break, frames nothing."""
    return text in framing and not text.isspace()
