"""Small tokenizers of the kinds that the served families use, made on the spot."""

from __future__ import annotations

from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

LINES = [
    "The quick brown fox jumps over the lazy dog.",
    "hello world, hello tokenizer, hello stream",
    '{"name": "Ada", "age": 36, "tags": ["a", "b"]}',
    "naïve café, 日本語のテキスト, emoji 😀 and 👩‍👩‍👧",
    "  indented\n\tand tabbed\n\n",
]


def byte_level(size: int = 400) -> tokenizers.Tokenizer:
    """As GPT-2, Llama 3 and Qwen: BPE on bytes, control tokens first."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(LINES * 4, trainer)
    made.add_tokens([AddedToken("<think>", normalized=False), AddedToken("two words", normalized=False)])
    return made


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2 and Mistral: BPE on characters with "▁" for a space, bytes as a fallback, BOS in front."""
    words = ["▁the", "▁fox", "▁hello", "▁world", "ello", "he", "lo", "▁▁", "é"]
    letters = sorted(
        {letter for word in words for letter in word} | set('abcdefghijklmnopqrstuvwxyz,.{}":0123456789')
    )
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges: list[tuple[str, str]] = []
    for word in words:
        whole = word[0]
        for letter in word[1:]:
            merges.append((whole, letter))
            whole += letter
            vocabulary.append(whole)
    vocab = {token: index for index, token in enumerate(dict.fromkeys(vocabulary))}
    made = tokenizers.Tokenizer(
        models.BPE(vocab, list(dict.fromkeys(merges)), unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return made


def metaspace() -> tokenizers.Tokenizer:
    """As older conversions: the Metaspace decoder."""
    made = tokenizers.Tokenizer(models.Unigram([("<s>", 0.0), ("▁", -2.0), ("▁the", -1.0), *LETTERS], unk_id=0))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens(["<s>"])
    return made


def word_piece() -> tokenizers.Tokenizer:
    """A decoder that is no concatenation of bytes: the library's own stream serves it."""
    vocab = {token: index for index, token in enumerate(["[UNK]", "hello", "world", "##s", "##ing", ",", "go"])}
    made = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    made.add_special_tokens(["[UNK]", "[SEP]"])
    return made


LETTERS = [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz"]


def save(folder: Path, backend: tokenizers.Tokenizer) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    return folder
