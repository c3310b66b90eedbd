"""Tries a stranger's tokenizer.json: a job of `children`, run in a process of its own.

The library's native code aborts where memory ends, and some regular expressions never end. So the file is first
tried here, within limits of time and memory. What a text can become is bounded by the file's own steps, whatever
the text: each step makes at most so many letters of one, and the product of all steps has a limit. The model's
pieces are measured and decoded, but not loaded: twice would take long. The file imports nothing of Petiole, so it
starts at once."""

from __future__ import annotations

import base64
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

CPU_S = 10.0
MEMORY_BYTES = 2**31
MAX_GROWTH = 64
"""Letters that the steps of a tokenizer may make of one."""
MAX_ADDED_TOKENS = 100_000
MAX_PIECE = 1024
"""Letters of a token."""
MAX_AFFIX = 64
"""Letters that a step puts before or after a text, and of the parts of words that a model marks with a prefix."""
MAX_WORD = 1000
"""Letters of a word that WordPiece divides: it takes the square of their number."""

_STEPS = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
"""The parts of a tokenizer, and where a sequence has its steps."""
_GROWTH = {"ByteLevel": 4, "BertNormalizer": 3, "BPEDecoder": 2, "WordPiece": 2, "CTC": 2}
_MAY_BE_EMPTY = re.compile(r"[*?|^$]|\\[bBAGzZ]|\{0?,|\{0\}")
"""Marks of regular expressions that may match between two letters."""
_STUB = {"type": "BPE", "vocab": {"u": 0}, "merges": [], "unk_token": "u"}
"""A model that makes a token of every letter."""
_LETTERS = "aZ0 \n\t'!é日😀"
_PROBE = 1000
"""Letters of a text that is tried."""
_KINDS = 64


class Refused(Exception):  # noqa: N818
    """(field, limit, value)"""


def answer(question: str) -> dict[str, Any]:
    """Whether a file is a tokenizer that may be loaded. `question`: its path."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        given = json.loads(Path(question).read_bytes())
        check(given)
        _try(given)
    except Refused as refused:
        return {"refused": refused.args}
    except MemoryError:
        return {"refused": ["it", f"must take at most {MEMORY_BYTES} bytes of memory", "more"]}
    except (ValueError, RecursionError, AttributeError, TypeError, KeyError):
        return {}  # the library says what is wrong
    return {}


def check(given: dict[str, Any]) -> None:
    """Raises Refused if the file says that a text, or a token, becomes too long."""
    added = given.get("added_tokens") or []
    _require("added_tokens", f"must be at most {MAX_ADDED_TOKENS}", len(added), MAX_ADDED_TOKENS)
    _check_pieces("added_tokens", (one["content"] for one in added))
    model = given.get("model") or {}
    _check_pieces("model.vocab", _pieces(given))
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        limit = f"must have at most {MAX_AFFIX} letters"
        _require(f"model.{key}", limit, len(model.get(key) or ""), MAX_AFFIX)
    longest = model.get("max_input_chars_per_word") or 0
    _require("model.max_input_chars_per_word", f"must be at most {MAX_WORD}", longest, MAX_WORD)
    for part in _STEPS:
        growth = 1
        for step in _steps(given.get(part), _STEPS[part]):
            growth *= growth_of(part, step)
            limit = f"must make at most {MAX_GROWTH} letters of one"
            _require(part, limit, min(growth, 10**9), MAX_GROWTH)


def _require(field: str, limit: str, value: int, most: int) -> None:
    if value > most:
        raise Refused(field, limit, value)


def _pieces(given: dict[str, Any]) -> Iterator[str]:
    """The tokens of the model's own vocabulary."""
    vocab = (given.get("model") or {}).get("vocab") or {}
    return iter(vocab) if isinstance(vocab, dict) else (one[0] for one in vocab)


def _check_pieces(field: str, pieces: Any) -> None:
    longest = max(map(len, pieces), default=0)
    _require(field, f"must have tokens of at most {MAX_PIECE} letters", longest, MAX_PIECE)


def _steps(part: Any, key: str) -> Iterator[dict[str, Any]]:
    if isinstance(part, dict):
        yield part
        for one in part.get(key) or []:
            yield from _steps(one, key)


def growth_of(part: str, step: dict[str, Any]) -> int:
    """How many letters a step makes of one. Raises Refused for what it adds to a text."""
    kind = step.get("type")
    if kind == "Precompiled":
        return growth_of_map(base64.b64decode(step["precompiled_charsmap"]))
    if kind == "Replace":
        content, pattern = step["content"], step["pattern"]
        if "String" in pattern:
            return max(1, -(-len(content) // max(1, len(pattern["String"]))))
        return max(1, len(content) + bool(content and _MAY_BE_EMPTY.search(pattern["Regex"])))
    for key in ("prepend", "prefix", "suffix", "pad_token", "word_delimiter_token"):
        limit = f"must have at most {MAX_AFFIX} letters"
        _require(f"{part}: {kind}.{key}", limit, len(step.get(key) or ""), MAX_AFFIX)
    return 1 if part == "post_processor" else _GROWTH.get(str(kind), 1)


def growth_of_map(charsmap: bytes) -> int:
    """The most letters that SentencePiece's map makes of a piece. The map has the size of a trie, the trie, and
    the texts that pieces become, each ended by NUL."""
    texts = charsmap[4 + int.from_bytes(charsmap[:4], "little") :]
    return max(1, *(len(one.decode(errors="replace")) for one in texts.split(b"\0")))


def _try(given: dict[str, Any]) -> None:
    """Encode and decode some texts: of each kind of letter, and of the letters in the regular expressions."""
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps({**given, "model": _STUB}))
    except (MemoryError, RecursionError):
        raise
    except BaseException as error:  # its own, and its panic; it raises nothing narrower
        raise Refused("it", "must be a tokenizer that the library can read", _in_a_line(error)) from None
    backend.no_truncation()
    backend.no_padding()
    steps = [step for part in _STEPS for step in _steps(given.get(part), _STEPS[part])]
    of_regexes = "".join(str(step["pattern"].get("Regex", "")) for step in steps if step.get("pattern"))
    most, kinds = MAX_GROWTH * (_PROBE + 1), list(dict.fromkeys(_LETTERS + of_regexes))[:_KINDS]
    for text in ["", *(letter * _PROBE for letter in kinds), (_LETTERS * _PROBE)[:_PROBE]]:
        try:
            tokens = len(backend.encode(text).ids)
        except Exception:  # of one text, which is refused; the library raises nothing narrower
            continue
        except BaseException as error:  # its panic
            raise Refused("it", "must encode short texts", _in_a_line(error)) from None
        _require("post_processor", f"must make at most {most} tokens of {_PROBE} letters", tokens, most)
    if (decoder := backend.decoder) is not None:
        for pieces in ([], [letter * MAX_AFFIX for letter in kinds], *([one] for one in _pieces(given))):
            try:
                decoder.decode(pieces)
            except BaseException as error:
                limit = "must decode each token, and no token"
                raise Refused("decoder", limit, _in_a_line(error)) from None


def _in_a_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
