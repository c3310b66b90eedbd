"""The tokenizer of a GGUF file gives the tokens of the tokenizer from which the file was made."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from petiole.gpu_worker.exceptions import ModelError
from petiole.gpu_worker.text import load_tokenizer
from petiole.gpu_worker.text.gguf_tokenizer.cuts import CUTS
from tests.support import gguf

CORPUS = [
    "The quick brown fox jumps over the lazy dog; it's 12345 times quicker than we'd thought, isn't it?",
    "def f(x):\n    return x ** 2  # squared\n\n\nprint(f(10))\t\r\n",
    "Größe, naïve café, Ελληνικά, кириллица, 日本語のテキスト, 한국어, हिन्दी, العربية",
    "e\u0301 and \u00e9 differ; 🙂🚀 do not. I'LL   go  there .",
    "numbers: 1 22 333 4444 55555; 3.14159; 1,000,000",
] * 4
TEXTS = [
    *CORPUS[:5],
    "",
    " ",
    "  two  spaces ",
    "x<|end|>y <|end|> z",
    "\x00\x07",
    "unseen: ☃ ﷽ ཨ",
    "▁under",
]


def written(tmp_path: Path, of: tokenizers.Tokenizer, kind: str, **more: Any) -> Path:
    """A file with this tokenizer and no model."""
    vocab = of.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = of.get_added_tokens_decoder()
    kinds = [1] * len(tokens)
    for i, token in added.items():
        kinds[i] = 3 if token.special else 4
    for i, token in enumerate(tokens):
        if kind == "llama" and len(token) == 6 and token.startswith("<0x"):
            kinds[i] = 6
    metadata = {
        "general.architecture": "qwen2",
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        **{f"tokenizer.ggml.{key}": value for key, value in more.items()},
    }
    return gguf.write(tmp_path / "tokenizer.gguf", metadata, {})


def same(path: Path, original: Any) -> None:
    found = load_model_tokenizer(path)
    for text in TEXTS:
        ids = original.encode(text).ids
        assert found.encode(text).ids == ids, text
        assert found.decode(ids) == original.decode(ids), text


def load_model_tokenizer(path: Path) -> tokenizers.Tokenizer:
    from petiole.gpu_worker.text.gguf_tokenizer.reading import tokenizer_of

    return tokenizer_of(path)[0]


def byte_level(pre_tokenizer: Any, normalizer: Any = None, **options: Any) -> tokenizers.Tokenizer:
    trained = tokenizers.Tokenizer(models.BPE(**options))
    trained.pre_tokenizer, trained.decoder = pre_tokenizer, decoders.ByteLevel()
    if normalizer is not None:
        trained.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet))
    trained.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    trained.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return trained


def merges_of(tokenizer: tokenizers.Tokenizer) -> list[Any]:
    return list(json.loads(tokenizer.to_str())["model"]["merges"])


def test_qwen2(tmp_path: Path) -> None:
    """The original is transformers' own."""
    empty = transformers.Qwen2Tokenizer().backend_tokenizer
    trained = byte_level(empty.pre_tokenizer, empty.normalizer)
    merges = merges_of(trained)
    original = transformers.Qwen2Tokenizer(
        vocab=trained.get_vocab(with_added_tokens=False), merges=[tuple(merge) for merge in merges]
    ).backend_tokenizer
    original.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    joined = [" ".join(merge) for merge in merges]
    path = written(tmp_path, original, "gpt2", pre="qwen2", merges=joined)
    same(path, original)


def test_llama3(tmp_path: Path) -> None:
    """The original is made by transformers' converter, with what Meta's tokenizer.json adds."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = TikTokenConverter().pattern
    words = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated", invert=False)
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    original = byte_level(pre_tokenizers.Sequence([words, in_bytes]), ignore_merges=True)
    bos = original.token_to_id("<|end|>")
    original.post_processor = processors.TemplateProcessing("<|end|> $A", special_tokens=[("<|end|>", bos)])
    joined = [" ".join(merge) for merge in merges_of(original)]
    same(written(tmp_path, original, "gpt2", pre="llama-bpe", merges=joined, bos_token_id=bos), original)
    path = written(
        tmp_path, original, "gpt2", pre="llama-bpe", merges=joined, bos_token_id=bos, add_bos_token=False
    )
    assert load_model_tokenizer(path).encode("a").ids == original.encode("a").ids[1:]


def words_of(name: str) -> Any:
    """What cuts words in a tokenizer.json with this cut, by another source than ours."""
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)

    def split(*patterns: str) -> Any:
        parts = [pre_tokenizers.Split(tokenizers.Regex(one), "isolated") for one in patterns]
        return pre_tokenizers.Sequence([*parts, in_bytes])

    if name in ("gpt-2", "olmo"):
        return gpt2
    if name in ("smollm", "starcoder", "refact", "command-r"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    if name == "qwen35":
        return transformers.Qwen3_5Tokenizer().backend_tokenizer.pre_tokenizer
    if name == "dbrx":
        from transformers.convert_slow_tokenizer import TikTokenConverter

        return split(TikTokenConverter().pattern)
    endings = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    upper, lower = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
    of_gpt4o = [  # as `tiktoken` has o200k_base
        rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]*[{lower}]+{endings}",
        rf"[^\r\n\p{{L}}\p{{N}}]?[{upper}]+[{lower}]*{endings}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
    return split("|".join(of_gpt4o))


@pytest.mark.parametrize(
    "name",
    ["gpt-2", "olmo", "smollm", "starcoder", "refact", "command-r", "qwen35", "dbrx", "gpt-4o", "llama4"],
)
def test_words_are_cut_as_in_the_source(tmp_path: Path, name: str) -> None:
    original = byte_level(words_of(name))
    joined = [" ".join(merge) for merge in merges_of(original)]
    path = written(tmp_path, original, "gpt2", pre=name, merges=joined)
    composed = [unicodedata.normalize("NFC", text) if CUTS[name].composed else text for text in TEXTS]
    found = load_model_tokenizer(path)
    for text, same_text in zip(TEXTS, composed, strict=True):
        assert found.encode(text, add_special_tokens=False).ids == original.encode(same_text).ids, text


@pytest.mark.parametrize("name", CUTS)
def test_every_cut_keeps_all_text(name: str) -> None:
    for text in TEXTS:
        for part in CUTS[name].parts:
            cut = pre_tokenizers.Split(tokenizers.Regex(part), "isolated")
            assert "".join(word for word, _ in cut.pre_tokenize_str(text)) == text


@pytest.mark.parametrize(
    ("one", "other"),
    [("llama-bpe", "lfm2"), ("llama-bpe", "pixtral"), ("qwen2", "deepseek-r1-qwen"), ("glm4", "chatglm-bpe")],
)
def test_aliases(one: str, other: str) -> None:
    assert CUTS[one] == CUTS[other]


def test_gemma4_has_pieces_and_merges(tmp_path: Path) -> None:
    """The space between two pieces of a merge is not one within them."""
    spaces = normalizers.Replace(" ", "▁")
    original = sentencepiece(
        spaces, decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    )
    joined = [" ".join(merge) for merge in merges_of(original)]
    same(
        written(tmp_path, original, "gemma4", merges=joined, unknown_token_id=0, bos_token_id=1, eos_token_id=2),
        original,
    )


def test_wordpiece(tmp_path: Path) -> None:
    """The original is transformers' own; the file has `▁` where it has no `##`, as llama.cpp's has."""
    trained = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer, trained.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trained.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=500, special_tokens=special))
    vocab = trained.get_vocab()
    original = transformers.BertTokenizer(vocab=vocab).backend_tokenizer
    tokens = sorted(vocab, key=vocab.__getitem__)
    stored = [t if t in special else t[2:] if t.startswith("##") else f"▁{t}" for t in tokens]
    metadata = {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": stored,
        "tokenizer.ggml.token_type": [3 if t in special else 1 for t in tokens],
        **{f"tokenizer.ggml.{key}_token_id": special.index(t) for key, t in BERT_ROLES.items()},
    }
    path = gguf.write(tmp_path / "t.gguf", metadata, {})
    same(path, original)
    found = load_model_tokenizer(path)
    one, other = found.encode("a dog", "the fox"), original.encode("a dog", "the fox")
    assert (one.ids, one.type_ids) == (other.ids, other.type_ids)


BERT_ROLES = {"padding": "[PAD]", "unknown": "[UNK]", "bos": "[CLS]", "seperator": "[SEP]", "mask": "[MASK]"}


def test_unigrams(tmp_path: Path) -> None:
    """The original is transformers' own of XLM-RoBERTa, with what SentencePiece makes of characters first."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    trained = tokenizers.Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=400, special_tokens=special, unk_token="<unk>")
    )
    pieces = json.loads(trained.to_str())["model"]["vocab"]
    original = transformers.XLMRobertaTokenizer(vocab=[tuple(one) for one in pieces]).backend_tokenizer
    tokens = [token for token, _ in json.loads(original.to_str())["model"]["vocab"]]
    scores = [float(score) for _, score in json.loads(original.to_str())["model"]["vocab"]]
    ids = {key: tokens.index(t) for key, t in (("bos", "<s>"), ("padding", "<pad>"), ("eos", "</s>"))}
    metadata = {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [3 if t in special or t == "<mask>" else 1 for t in tokens],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.unknown_token_id": tokens.index("<unk>"),
        **{f"tokenizer.ggml.{key}_token_id": i for key, i in ids.items()},
    }
    found = load_model_tokenizer(gguf.write(tmp_path / "t.gguf", metadata, {}))
    for text in TEXTS:
        if "\n" not in text and "\x00" not in text:  # which the original's normalizer removes
            assert found.encode(text).ids == original.encode(text).ids, text


def sentencepiece(normalizer: Any, decoder: Any) -> tokenizers.Tokenizer:
    """As in the tokenizer.json of Llama 2 and of Gemma."""
    specials = ["<unk>", "<s>", "</s>"]
    in_bytes = [f"<0x{i:02X}>" for i in range(256)]
    trained = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*specials, *in_bytes])
    trained.train_from_iterator(CORPUS, trainer)
    vocab, merges = trained.get_vocab(with_added_tokens=False), merges_of(trained)
    model = models.BPE(
        vocab, [tuple(merge) for merge in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    original = tokenizers.Tokenizer(model)
    original.normalizer, original.decoder = normalizer, decoder
    original.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    original.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return original


def scores_of(tokenizer: tokenizers.Tokenizer) -> list[float]:
    """A piece that is merged earlier has a higher score."""
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    scores = [0.0] * len(vocab)
    for rank, (left, right) in enumerate(merges_of(tokenizer)):
        scores[vocab[left + right]] = -float(rank)
    return scores


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece(tmp_path: Path, prefix: bool) -> None:
    """With a space before the first word, as Llama 2, or without, as Gemma."""
    spaces = normalizers.Replace(" ", "▁")
    back = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        original = sentencepiece(
            normalizers.Sequence([normalizers.Prepend("▁"), spaces]),
            decoders.Sequence([*back, decoders.Strip(" ", 1, 0)]),
        )
    else:
        original = sentencepiece(spaces, decoders.Sequence(back))
    path = written(
        tmp_path,
        original,
        "llama",
        scores=scores_of(original),
        add_space_prefix=prefix,
        unknown_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    same(path, original)
    if not prefix:
        gemma = transformers.GemmaTokenizer().backend_tokenizer
        assert type(gemma.normalizer) is type(original.normalizer)


def test_roles_and_the_template_are_read(tmp_path: Path) -> None:
    original = byte_level(pre_tokenizers.ByteLevel())
    end = original.token_to_id("<|end|>")
    joined = [" ".join(merge) for merge in merges_of(original)]
    path = written(tmp_path, original, "gpt2", pre="qwen2", merges=joined, eos_token_id=end)
    whole = gguf_metadata(path) | {
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
        **{
            f"qwen2.{key}": 4
            for key in ("block_count", "context_length", "embedding_length", "feed_forward_length")
        },
        "qwen2.attention.head_count": 2,
    }
    tokens = len(original.get_vocab())
    gguf.write(path, whole, {"token_embd.weight": ("F32", (tokens, 4), bytes(16 * tokens))})
    tokenizer = load_tokenizer(path)
    assert tokenizer.eos_token_ids == {end}
    assert tokenizer.backend.get_added_tokens_decoder()[end].special
    assert tokenizer.facts["chat"] is True


def gguf_metadata(path: Path) -> dict[str, Any]:
    from petiole.gpu_worker.models.checkpoint.gguf.header import read_header

    return dict(read_header(path).metadata)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"pre": "llama-bp"}, "such as llama-bpe"),
        ({"pre": "kimi-k2"}, "tokenizer.ggml.pre must be one of"),
        ({"model": "rwkv"}, "tokenizer.ggml.model must be gpt2 or llama or gemma4 or bert or t5, got 'rwkv'"),
        ({"merges": ["a b c"]}, "merges"),
        ({"merges": 5}, "merges must be a list of str"),
        ({"token_type": [1]}, "token_type must have one for each of"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "tokens must be different texts"),
        ({"eos_token_id": 10**6}, "eos_token_id must be from 0 to"),
    ],
)
def test_tokenizers_that_are_not_known_are_refused(tmp_path: Path, changed: dict[str, Any], why: str) -> None:
    original = byte_level(pre_tokenizers.ByteLevel())
    joined = [" ".join(merge) for merge in merges_of(original)]
    path = written(tmp_path, original, "gpt2", pre="qwen2", merges=joined)
    other = {f"tokenizer.ggml.{key}": value for key, value in changed.items()}
    gguf.write(path, gguf_metadata(path) | other, {})
    with pytest.raises(ModelError, match=r"^[^\n]*$") as raised:
        load_tokenizer(path)
    assert why in str(raised.value)
