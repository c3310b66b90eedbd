"""Encoders of texts with random weights, written on the fly: the values of the weights do not change the speed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

VOCAB, MOST_TOKENS = 30_522, 512
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "yes", "no")
TEMPLATE = "{{ messages | map(attribute='content') | join(' ') }}"


@dataclass(frozen=True)
class Encoder:
    """A BERT, or an XLM-RoBERTa, in float32. first: a text's vector is that of its first position, not the mean of
    all."""

    name: str
    kind: str
    width: int
    layers: int
    heads: int
    first: bool

    @property
    def inner(self) -> int:
        return 4 * self.width

    @property
    def products(self) -> Sequence[tuple[int, int]]:
        """Outputs and inputs of a layer's linear maps."""
        width, inner = self.width, self.inner
        return (3 * width, width), (width, width), (inner, width), (width, inner)

    def operations(self, tokens: int) -> float:
        """The operations of a text's linear maps and of its attention."""
        linear = sum(outputs * inputs for outputs, inputs in self.products)
        return 2.0 * self.layers * tokens * (linear + 2 * tokens * self.width)

    def write(self, folder: Path) -> None:
        """The model, a tokenizer of words, and the files of sentence-transformers."""
        from safetensors.torch import save_file

        save_file(self._tensors(), folder / "model.safetensors", metadata={"format": "pt"})
        architecture = {"bert": "BertModel", "xlm-roberta": "XLMRobertaModel"}[self.kind]
        config = {"architectures": [architecture], "model_type": self.kind, "torch_dtype": "float32"}
        sizes = {"vocab_size": VOCAB, "hidden_size": self.width, "intermediate_size": self.inner}
        sizes |= {"num_hidden_layers": self.layers, "num_attention_heads": self.heads, "pad_token_id": 0}
        sizes |= {"max_position_embeddings": self._positions, "type_vocab_size": 2}
        (folder / "config.json").write_text(json.dumps({**config, **sizes}))
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

    @property
    def _positions(self) -> int:
        return MOST_TOKENS if self.kind == "bert" else MOST_TOKENS + 1  # the first is that of padding

    def _tensors(self) -> dict[str, torch.Tensor]:
        width, generator = self.width, torch.Generator().manual_seed(0)

        def normal(*size: int) -> torch.Tensor:
            return torch.empty(size).normal_(0, 0.02, generator=generator)

        def norm(name: str) -> dict[str, torch.Tensor]:
            return {f"{name}.weight": torch.ones(width), f"{name}.bias": torch.zeros(width)}

        def linear(name: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
            return {f"{name}.weight": normal(outputs, inputs), f"{name}.bias": torch.zeros(outputs)}

        tensors = {
            "embeddings.word_embeddings.weight": normal(VOCAB, width),
            "embeddings.position_embeddings.weight": normal(self._positions, width),
            "embeddings.token_type_embeddings.weight": normal(2, width),
            **norm("embeddings.LayerNorm"),
        }
        for k in range(self.layers):
            at = f"encoder.layer.{k}"
            for name in ("query", "key", "value"):
                tensors |= linear(f"{at}.attention.self.{name}", width, width)
            tensors |= linear(f"{at}.attention.output.dense", width, width) | norm(
                f"{at}.attention.output.LayerNorm"
            )
            tensors |= linear(f"{at}.intermediate.dense", self.inner, width)
            tensors |= linear(f"{at}.output.dense", width, self.inner) | norm(f"{at}.output.LayerNorm")
        return tensors


MINILM = Encoder("MiniLM-L6 shape, fp32", "bert", 384, 6, 12, first=False)
BGE_M3 = Encoder("BGE-M3 shape, fp32", "xlm-roberta", 1024, 24, 16, first=True)


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
