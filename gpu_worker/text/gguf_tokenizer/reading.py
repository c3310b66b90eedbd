"""The tokenizer of a GGUF file, as the `tokenizers` library has it. By `tokenizer.ggml.model`:

gpt2    byte-level BPE with merges; `tokenizer.ggml.pre` names how text is cut before (`cuts`)
llama   SentencePiece's BPE: a piece's score says how early it is merged
gemma4  the same pieces, with merges in place of scores
bert    WordPiece; the file has `▁` before the beginnings of words, in place of `##` before their other pieces
t5      SentencePiece's unigrams: the pieces with the highest sum of scores"""

from __future__ import annotations

import math
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import shown
from petiole.gpu_worker.models.checkpoint.gguf.header import read_header
from petiole.gpu_worker.text.foreign._tokenizer_process import (
    MAX_ADDED_TOKENS,
    MAX_GROWTH,
    MAX_PIECE,
    growth_of_map,
)
from petiole.gpu_worker.text.gguf_tokenizer.cuts import CUTS

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6
_SPACE = "▁"
_ROLES = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
    "sep_token": "seperator",  # so spelled in the format
    "cls_token": "cls",
    "mask_token": "mask",
}


def tokenizer_of(path: Path) -> tuple[Tokenizer, dict[str, Any], Mapping[str, int]]:
    """The tokenizer, what tokenizer_config.json would say of it, and its vocabulary. Raises ModelError for an
    unknown one."""
    return _GgufReader(path).read()


class _GgufReader:
    def __init__(self, path: Path) -> None:
        self._path, self._metadata = path, read_header(path).metadata
        self._tokens: list[str] = self._list("tokens", str)
        self._kinds: list[int] = self._list("token_type", int, len(self._tokens))
        if (longest := max(map(len, self._tokens), default=0)) > MAX_PIECE:
            raise self._wrong("tokens", f"have at most {MAX_PIECE} letters each", longest)
        if (added := self._kinds.count(_CONTROL) + self._kinds.count(_USER_DEFINED)) > MAX_ADDED_TOKENS:
            raise self._wrong("token_type", f"have at most {MAX_ADDED_TOKENS} control and user's tokens", added)

    def read(self) -> tuple[Tokenizer, dict[str, Any], Mapping[str, int]]:
        model = self._get("model")
        makers = {
            "gpt2": self._byte_level,
            "llama": self._sentencepiece,
            "gemma4": self._sentencepiece,
            "bert": self._wordpiece,
            "t5": self._unigram,
        }
        if not isinstance(model, str) or model not in makers:
            raise self._wrong("model", f"be {' or '.join(makers)}", shown(model))
        backend = makers[model]()
        special = [token for token, kind in zip(self._tokens, self._kinds, strict=True) if kind == _CONTROL]
        defined = [token for token, kind in zip(self._tokens, self._kinds, strict=True) if kind == _USER_DEFINED]
        backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        config = {role: self._tokens[i] for role, key in _ROLES.items() if (i := self._id(key)) is not None}
        template = self._metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            config["chat_template"] = template
        self._add_ends(backend)
        return backend, config, self._vocab

    def _byte_level(self) -> Tokenizer:
        pre = self._get("pre")
        if not isinstance(pre, str) or pre not in CUTS:
            near = ", ".join(get_close_matches(pre if isinstance(pre, str) else "", CUTS, 3, 0.5))
            near = near or "llama-bpe or qwen2"
            raise self._wrong("pre", f"be one of {len(CUTS)} names, such as {near}, for gpt2", shown(pre))
        cut = CUTS[pre]
        backend = self._bpe(self._merges(), ignore_merges=cut.whole)
        if cut.composed:
            backend.normalizer = normalizers.NFC()
        words = [pre_tokenizers.Split(Regex(part), behavior="isolated") for part in cut.parts]
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*words, in_bytes])
        backend.decoder = decoders.ByteLevel()
        return backend

    def _merges(self) -> list[tuple[str, ...]]:
        """A space within a piece is not the one between two."""
        return [
            (merge[:at], merge[at + 1 :]) if (at := merge.find(" ", 1)) > 0 else (merge,)
            for merge in self._list("merges", str)
        ]

    def _wordpiece(self) -> Tokenizer:
        def of_hub(token: str, kind: int) -> str:
            if kind in (_CONTROL, _USER_DEFINED) or (token[:1], token[-1:]) == ("[", "]"):
                return token
            return token[1:] if token.startswith(_SPACE) else f"##{token}"

        self._tokens = [of_hub(*one) for one in zip(self._tokens, self._kinds, strict=True)]
        unknown = self._id("unknown")
        unk_token = "[UNK]" if unknown is None else self._tokens[unknown]
        backend = Tokenizer(models.WordPiece(vocab=self._vocab, unk_token=unk_token))
        lower = self._flag("normalizer.lowercase", True)
        accents = self._flag("normalizer.strip_accents", lower)
        backend.normalizer = normalizers.BertNormalizer(lowercase=lower, strip_accents=accents)
        backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        backend.decoder = decoders.WordPiece()
        return backend

    def _unigram(self) -> Tokenizer:
        backend = Tokenizer(
            models.Unigram([*zip(self._vocab, self._scores(), strict=True)], unk_id=self._id("unknown") or 0)
        )
        stages: list[Any] = []
        if self._get("precompiled_charsmap"):
            mapped = bytes(one & 255 for one in self._list("precompiled_charsmap", int))
            if (growth := growth_of_map(mapped)) > MAX_GROWTH:
                limit = f"make at most {MAX_GROWTH} letters of one"
                raise self._wrong("precompiled_charsmap", limit, growth)
            try:
                stages.append(normalizers.Precompiled(mapped))
            except BaseException as error:  # the library raises nothing narrower, and its panic is no Exception
                raise self._wrong("precompiled_charsmap", "be a map", " ".join(str(error).split())) from None
        if self._flag("remove_extra_whitespaces", True):
            stages += [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
        backend.normalizer = normalizers.Sequence(stages)
        first: Any = "always" if self._flag("add_space_prefix", True) else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme=first)
        backend.decoder = decoders.Metaspace(_SPACE, prepend_scheme=first)
        return backend

    def _sentencepiece(self) -> Tokenizer:
        merged = self._get("model") == "gemma4"
        prefix = self._flag("add_space_prefix", not merged)
        unknown = self._id("unknown")
        backend = self._bpe(
            self._merges() if merged else self._merges_by_score(),
            unk_token=None if unknown is None else self._tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        spaces = normalizers.Replace(" ", _SPACE)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
        back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
        return backend

    @cached_property
    def _vocab(self) -> dict[str, int]:
        vocab = {token: i for i, token in enumerate(self._tokens)}
        if len(vocab) != len(self._tokens):
            raise self._wrong(
                "tokens", "be different texts", f"{len(self._tokens) - len(vocab)} that repeat others"
            )
        return vocab

    def _bpe(self, merges: list[Any], **options: Any) -> Tokenizer:
        vocab = self._vocab
        try:
            return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
        except Exception as error:  # the library raises nothing narrower
            said = " ".join(str(error).split())
            raise ModelError(f"{self._path}: its tokenizer's merges cannot be used: {said}") from None

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Every way to make a piece of two others, the best piece first. Of pieces in the order of the alphabet,
        those with which one begins stand before it, each with which the next one begins: `starts`."""
        tokens = self._tokens
        both = zip(self._vocab.items(), self._kinds, strict=True)
        plain = {token: i for (token, i), kind in both if kind not in (_CONTROL, _BYTE)}
        best = -np.array(self._scores())
        starts: list[str] = []
        found: list[int] = []
        for token in sorted(plain):
            while starts and not token.startswith(starts[-1]):
                starts.pop()
            for start in starts:
                if (end := plain.get(token[len(start) :])) is not None:
                    found += plain[token], plain[start], end
            starts.append(token)
        wholes, lefts, rights = np.array(found, np.int64).reshape(-1, 3).T
        order = np.lexsort((rights, lefts, best[wholes]))
        pairs = zip(lefts[order].tolist(), rights[order].tolist(), strict=True)
        return [(tokens[left], tokens[right]) for left, right in pairs]

    def _add_ends(self, backend: Tokenizer) -> None:
        """The tokens that begin and end a prompt, and stand between a pair's texts, unless told otherwise."""
        kind, pre = self._get("model"), self._get("pre")
        words = kind == "bert"
        begins = kind in ("llama", "gemma4", "bert") or (kind == "gpt2" and CUTS[pre].begins)
        first = self._first_of(*(("cls", "bos") if words else ("bos", "cls")))
        last = self._first_of(*(("seperator",) if words else ("eos", "seperator")))
        bos = first if self._flag("add_bos_token", begins) else None
        eos = last if self._flag("add_eos_token", kind in ("bert", "t5")) else None
        before, after = ([] if i is None else [self._tokens[i]] for i in (bos, eos))
        special = [(self._tokens[i], i) for i in dict.fromkeys((bos, eos)) if i is not None]
        if special:
            second = ["$B:1", *(f"{one}:1" for one in after)] if words else [*after, "$B", *after]
            backend.post_processor = processors.TemplateProcessing(
                single=[*before, "$A", *after], pair=[*before, "$A", *after, *second], special_tokens=special
            )

    def _first_of(self, *keys: str) -> int | None:
        return next((i for i in map(self._id, keys) if i is not None), None)

    def _id(self, key: str) -> int | None:
        found = self._get(f"{key}_token_id")
        if found is None:
            return None
        if not isinstance(found, int) or not 0 <= found < len(self._tokens):
            raise self._wrong(f"{key}_token_id", f"be from 0 to {len(self._tokens) - 1}", shown(found))
        return found

    def _scores(self) -> list[float]:
        found: list[float] = self._list("scores", float, len(self._tokens))
        if (wrong := next((i for i, score in enumerate(found) if math.isnan(score)), None)) is not None:
            raise self._wrong("scores", "be numbers", f"nan for token {wrong}")
        return found

    def _flag(self, key: str, default: bool) -> bool:
        found = self._get(key, default)
        if not isinstance(found, bool):
            raise self._wrong(key, "be true or false", shown(found))
        return found

    def _list(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        found = self._get(key)
        if not isinstance(found, list) or not {kind}.issuperset(map(type, found)):
            raise self._wrong(key, f"be a list of {kind.__name__}", shown(found))
        if length is not None and len(found) != length:
            raise self._wrong(key, f"have one for each of {length} tokens", len(found))
        return found

    def _get(self, key: str, default: object = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _wrong(self, key: str, limit: str, got: object) -> ModelError:
        return ModelError(f"{self._path}: tokenizer.ggml.{key} must {limit}, got {got}")
