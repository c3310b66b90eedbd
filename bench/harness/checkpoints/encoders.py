"""Encoders of texts with random weights, written on the fly: the values of the weights do not change the speed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

VOCAB, MOST_TOKENS = 30_522, 512
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "yes", "no")
TEMPLATE = "{{ messages | map(attribute='content') | join(' ') }}"


@dataclass(frozen=True)
class Encoder:
    """An encoder of transformers in float32. kind: its `model_type`. first: a text's vector is that of its first
    position, not the mean of all. before: rows of the table of positions before the first; the last of them is the
    id of padding. gated: a feed-forward has two products of its inputs."""

    name: str
    kind: str
    width: int
    layers: int
    heads: int
    first: bool = False
    before: int = 0
    gated: bool = False

    @property
    def inner(self) -> int:
        return 4 * self.width

    @property
    def products(self) -> Sequence[tuple[int, int]]:
        """Outputs and inputs of a layer's linear maps."""
        width, inner = self.width, self.inner
        return (3 * width, width), (width, width), ((1 + self.gated) * inner, width), (width, inner)

    def operations(self, tokens: int) -> float:
        """The operations of a text's linear maps and of its attention."""
        linear = sum(outputs * inputs for outputs, inputs in self.products)
        return 2.0 * self.layers * tokens * (linear + 2 * tokens * self.width)

    def write(self, folder: Path) -> None:
        """The model, a tokenizer of words, and the files of sentence-transformers."""
        from transformers import AutoConfig, AutoModel

        sizes = {"vocab_size": VOCAB, "hidden_size": self.width, "intermediate_size": self.inner}
        sizes |= {"num_hidden_layers": self.layers, "num_attention_heads": self.heads}
        sizes |= {"max_position_embeddings": MOST_TOKENS + self.before, "pad_token_id": max(self.before - 1, 0)}
        AutoModel.from_config(AutoConfig.for_model(self.kind, **sizes)).save_pretrained(folder)
        write_tokenizer(folder, VOCAB, ("[CLS]", "[SEP]"))
        names = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
        listed = [
            {"idx": k, "name": str(k), "path": path, "type": f"sentence_transformers.models.{name}"}
            for k, (name, path) in enumerate(names)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
        (folder / "1_Pooling").mkdir()
        modes = {"pooling_mode_cls_token": self.first, "pooling_mode_mean_tokens": not self.first}
        pooling: Mapping[str, Any] = {"word_embedding_dimension": self.width, **modes}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        told = {"max_seq_length": MOST_TOKENS, "do_lower_case": False}
        (folder / "sentence_bert_config.json").write_text(json.dumps(told))


MINILM = Encoder("MiniLM-L6 shape, fp32", "bert", 384, 6, 12)
BGE_M3 = Encoder("BGE-M3 shape, fp32", "xlm-roberta", 1024, 24, 16, first=True, before=1)
MPNET = Encoder("all-mpnet-base shape, fp32", "mpnet", 768, 12, 12, before=2)
NOMIC = Encoder("nomic-embed shape, fp32", "nomic_bert", 768, 12, 12, gated=True)


def words(n: int, length: int, seed: int = 0, vocab_size: int = VOCAB) -> list[str]:
    """Texts of this many words, which are a token each."""
    drawn = np.random.default_rng(seed).integers(len(SPECIAL), vocab_size, (n, length))
    return [" ".join(f"w{number}" for number in line) for line in drawn.tolist()]


def write_tokenizer(folder: Path, vocab_size: int, around: Sequence[str] = ()) -> None:
    """A tokenizer of words. around: the special tokens before and after a text."""
    import tokenizers
    from tokenizers import models, pre_tokenizers, processors

    vocab = {text: k for k, text in enumerate((*SPECIAL, *(f"w{k}" for k in range(len(SPECIAL), vocab_size))))}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if around:
        backend.post_processor = processors.BertProcessing(*[(text, vocab[text]) for text in reversed(around)])
    backend.save(str(folder / "tokenizer.json"))
    roles = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
