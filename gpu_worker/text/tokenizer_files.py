"""A tokenizer from a folder in Hugging Face format, or from a GGUF file (`text.gguf_tokenizer`).

tokenizer.json              the tokenizer itself; required
tokenizer_config.json       special tokens by role, chat template, more added tokens
special_tokens_map.json     special tokens by role, where the former does not name them
generation_config.json, config.json     the ids that end an output
chat_template.jinja, additional_chat_templates/*.jinja      win over the template in tokenizer_config.json
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import tokenizers

from petiole.gpu_worker.children import Child, ChildEnded
from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.models.checkpoint.configuration import MAX_BYTES, check_file, read_json, read_text
from petiole.gpu_worker.models.checkpoint.opening import end_token_ids, is_gguf
from petiole.gpu_worker.text.foreign import _tokenizer_process
from petiole.gpu_worker.text.foreign._tokenizer_process import CPU_S, MAX_ADDED_TOKENS, MEMORY_BYTES
from petiole.gpu_worker.text.gguf_tokenizer.reading import tokenizer_of
from petiole.gpu_worker.text.tokenizer import Tokenizer

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer in a folder or a GGUF file. Raises ModelError, in one line, for a missing or broken file."""
    folder, special_map, vocab = Path(folder), dict[str, Any](), None
    if is_gguf(folder):
        backend, config, vocab = tokenizer_of(folder)
    else:
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such model folder")
        backend = _backend(folder / "tokenizer.json")
        config, special_map = (
            read_json(path) if path.is_file() else {}
            for path in (folder / "tokenizer_config.json", folder / "special_tokens_map.json")
        )
    roles = _special_tokens(config, special_map)
    _add_missing_tokens(backend, config, roles)
    eos = end_token_ids(folder)
    named = backend.token_to_id(roles["eos_token"]) if "eos_token" in roles else None
    return Tokenizer(
        backend,
        special_tokens=roles,
        eos_token_ids=eos if named is None else eos | {named},
        chat_templates=_chat_templates(folder, config),
        control_tokens=_control_tokens(config),
        described=_described_outputs(config),
        vocab=vocab,
    )


def _backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError(f"{path}: missing; a tokenizer in the format of the `tokenizers` library is needed")
    check_tokenizer(path)
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and its panic is not an Exception
        raise ModelError(f"{path}: not a readable tokenizer: {_one_line(error)}") from error


def _special_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens' texts by role, including "additional_special_tokens" and the checkpoint's own roles."""
    found: dict[str, Any] = {}
    for source in (special_map, config):
        for role in SPECIAL_ROLES:
            text = _token_text(source.get(role))
            if text is not None:
                found[role] = text
        more = source.get("additional_special_tokens") or source.get("extra_special_tokens")
        if isinstance(more, list):
            found["additional_special_tokens"] = [text for text in map(_token_text, more) if text is not None]
        elif isinstance(more, dict):
            found.update({role: text for role, token in more.items() if (text := _token_text(token)) is not None})
    return found


def _token_text(token: object) -> str | None:
    """A token as configurations write it: its text, or an object with it."""
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    try:
        token.encode()
    except UnicodeEncodeError:
        raise ModelError(f"special tokens must be text that UTF-8 can encode, got {token[:100]!a}") from None
    return token


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], roles: Mapping[str, Any]
) -> None:
    """Add tokens that only the configuration knows, or that only it calls special, as `transformers` does."""
    known, missing_here = backend.get_added_tokens_decoder(), dict[str, tokenizers.AddedToken]()
    next_id = backend.get_vocab_size(with_added_tokens=True)
    for token_id, token in sorted(_described_tokens(config).items()):
        present = backend.token_to_id(token.content)
        if token_id not in known and token.content not in missing_here and token_id in (present, next_id):
            missing_here[token.content] = token
            next_id += present is None
    backend.add_tokens(list(missing_here.values()))
    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    named = [text for value in roles.values() for text in (value if isinstance(value, list) else [value])]
    missing = [text for text in named if text not in special and backend.token_to_id(text) is not None]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in missing])


def _control_tokens(config: Mapping[str, Any]) -> list[str] | None:
    """The configuration's "chat_control_tokens", as `transformers` has them."""
    given = config.get("chat_control_tokens")
    if given is not None and not (isinstance(given, list) and all(isinstance(one, str) for one in given)):
        raise ModelError("tokenizer_config.json: chat_control_tokens must be a list of texts")
    return given


def _described_outputs(config: Mapping[str, Any]) -> dict[str, Any]:
    """What the configuration says of the form of outputs: `response_template`, as in `transformers`, and
    `tool_parser_type`, as in `mlx-lm`. Nothing here depends on it, so another form is left out."""
    template, format = config.get("response_template"), config.get("tool_parser_type")
    return {
        "response_template": template if isinstance(template, dict) else None,
        "tool_format": format if isinstance(format, str) else None,
    }


def _described_tokens(config: Mapping[str, Any]) -> dict[int, tokenizers.AddedToken]:
    """The configuration's "added_tokens_decoder"."""
    described = config.get("added_tokens_decoder") or {}
    if hasattr(described, "__len__") and len(described) > MAX_ADDED_TOKENS:
        limit = f"must name at most {MAX_ADDED_TOKENS} tokens"
        raise ModelError(f"tokenizer_config.json: added_tokens_decoder {limit}, got {len(described)}")
    found = {}
    try:
        for key, entry in described.items():
            special = bool(entry.get("special", False))
            found[int(key)] = tokenizers.AddedToken(
                entry["content"],
                special=special,
                lstrip=bool(entry.get("lstrip", False)),
                rstrip=bool(entry.get("rstrip", False)),
                single_word=bool(entry.get("single_word", False)),
                normalized=bool(entry.get("normalized", not special)),
            )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError("tokenizer_config.json: added_tokens_decoder must map ids to tokens") from error
    return found


def _chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    given = config.get("chat_template")
    if isinstance(given, str):
        found["default"] = given
    elif isinstance(given, list):
        try:
            found = {str(entry["name"]): str(entry["template"]) for entry in given}
        except (KeyError, TypeError) as error:
            raise ModelError(
                f"{folder}/tokenizer_config.json: chat_template must map names to templates"
            ) from error
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    return found | {name: read_text(path) for name, path in files.items()}


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def check_tokenizer(path: Path) -> None:
    """Try a stranger's tokenizer.json in a process of its own before this process loads it. Raises ModelError for
    one that would take too much of a text, or too much to be read."""
    check_file(path, MAX_BYTES)
    found = path.stat()
    _check(path, (found.st_ino, found.st_mtime_ns, found.st_size))


@lru_cache(maxsize=64)
def _check(path: Path, content: tuple[int, ...]) -> None:
    """content: tells the file from another one of this name."""
    child = Child(_tokenizer_process.__file__)
    try:
        answer = child.ask(str(path.absolute()))
    except ChildEnded:
        limits = f"{CPU_S:g} s of processor time and {MEMORY_BYTES} bytes of memory"
        raise ModelError(f"{path}: must be read, and encode short texts, within {limits}: it took more") from None
    finally:
        child.close()
    if refused := answer.get("refused"):
        field, limit, value = refused
        raise ModelError(f"{path}: {field} {limit}, got {value}")
