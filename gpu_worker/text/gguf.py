"""The tokenizer of a GGUF file, as the `tokenizers` library has it.

`tokenizer.ggml.model` "gpt2" is byte-level BPE with merges; `tokenizer.ggml.pre` names how text is cut before.
"llama" is SentencePiece's BPE: a piece's score says how early it is merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from petiole.gpu_worker.errors import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import shown
from petiole.gpu_worker.models.checkpoint.gguf.header import read_header

_WORDS = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"""
_WORDS += r"""|\s+(?!\S)|\s+"""
CUTS = {"llama-bpe": _WORDS % "{1,3}", "qwen2": _WORDS % ""}
"""How text is cut into words, by `tokenizer.ggml.pre`."""

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_of(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """The tokenizer, and what tokenizer_config.json would say of it. Raises ModelError for an unknown one."""
    return _Reader(path).read()


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path, self._metadata = path, read_header(path).metadata
        self._tokens: list[str] = self._list("tokens", str)
        self._kinds: list[int] = self._list("token_type", int, len(self._tokens))

    def read(self) -> tuple[Tokenizer, dict[str, Any]]:
        model = self._get("model")
        if model not in ("gpt2", "llama"):
            raise self._wrong("model", "be gpt2 or llama", shown(model))
        backend = self._byte_level() if model == "gpt2" else self._sentencepiece()
        special = [token for token, kind in zip(self._tokens, self._kinds, strict=True) if kind == _CONTROL]
        defined = [token for token, kind in zip(self._tokens, self._kinds, strict=True) if kind == _USER_DEFINED]
        backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in defined])
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
        config = {role: self._tokens[i] for role, key in _ROLES.items() if (i := self._id(key)) is not None}
        template = self._metadata.get("tokenizer.chat_template")
        if isinstance(template, str):
            config["chat_template"] = template
        self._add_ends(backend)
        return backend, config

    def _byte_level(self) -> Tokenizer:
        pre = self._get("pre")
        if pre not in CUTS:
            raise self._wrong("pre", f"be {' or '.join(CUTS)} for gpt2", shown(pre))
        merges = [tuple(merge.split(" ")) for merge in self._list("merges", str)]
        backend = self._bpe(merges, ignore_merges=pre == "llama-bpe")
        if pre == "qwen2":
            backend.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(CUTS[pre]), behavior="isolated")
        in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([words, in_bytes])
        backend.decoder = decoders.ByteLevel()
        return backend

    def _sentencepiece(self) -> Tokenizer:
        prefix = bool(self._get("add_space_prefix", True))
        unknown = self._id("unknown")
        backend = self._bpe(
            self._merges_by_score(),
            unk_token=None if unknown is None else self._tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
        spaces = normalizers.Replace(" ", _SPACE)
        backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if prefix else spaces
        back = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
        return backend

    def _bpe(self, merges: list[Any], **options: Any) -> Tokenizer:
        vocab = {token: i for i, token in enumerate(self._tokens)}
        if len(vocab) != len(self._tokens):
            raise self._wrong(
                "tokens", "be different texts", f"{len(self._tokens) - len(vocab)} that repeat others"
            )
        try:
            return Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
        except Exception as error:  # the library raises nothing narrower
            said = " ".join(str(error).split())
            raise ModelError(f"{self._path}: its tokenizer's merges cannot be used: {said}") from None

    def _merges_by_score(self) -> list[tuple[str, str]]:
        """Every way to make a piece of two others, the best piece first."""
        scores: list[float] = self._list("scores", float, len(self._tokens))
        ids = {token: i for i, token in enumerate(self._tokens)}
        plain = {token for token, kind in zip(self._tokens, self._kinds, strict=True) if kind not in (_CONTROL, 6)}
        found = []
        for token in plain:
            for at in range(1, len(token)):
                left, right = token[:at], token[at:]
                if left in plain and right in plain:
                    found.append((-scores[ids[token]], ids[left], ids[right], left, right))
        return [(left, right) for *_, left, right in sorted(found)]

    def _add_ends(self, backend: Tokenizer) -> None:
        """The tokens that begin and end a prompt. A tokenizer of SentencePiece, and Llama 3's, begin one with
        `bos` unless told otherwise."""
        begins = self._get("model") == "llama" or self._get("pre") == "llama-bpe"
        bos = self._id("bos") if self._get("add_bos_token", begins) else None
        eos = self._id("eos") if self._get("add_eos_token", False) else None
        ends = {i: self._tokens[i] for i in (bos, eos) if i is not None}
        template = " ".join(
            [*([ends[bos]] if bos is not None else []), "$A", *([ends[eos]] if eos is not None else [])]
        )
        if ends:
            special = [(token, i) for i, token in ends.items()]
            backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)

    def _id(self, key: str) -> int | None:
        found = self._get(f"{key}_token_id")
        if found is None:
            return None
        if not isinstance(found, int) or not 0 <= found < len(self._tokens):
            raise self._wrong(f"{key}_token_id", f"be from 0 to {len(self._tokens) - 1}", shown(found))
        return found

    def _list(self, key: str, kind: type, length: int | None = None) -> list[Any]:
        found = self._get(key)
        if not isinstance(found, list) or not all(isinstance(one, kind) for one in found):
            raise self._wrong(key, f"be a list of {kind.__name__}", shown(found))
        if length is not None and len(found) != length:
            raise self._wrong(key, f"have one for each of {length} tokens", len(found))
        return found

    def _get(self, key: str, default: object = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _wrong(self, key: str, limit: str, got: object) -> ModelError:
        return ModelError(f"{self._path}: tokenizer.ggml.{key} must {limit}, got {got}")
