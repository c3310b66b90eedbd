"""Small random models of texts in folders of their own, written by transformers, with the files of
sentence-transformers; and what transformers makes of a text, pooled by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.support.families import SHAPE, drawn

transformers = pytest.importorskip("transformers")

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
OF_MPNET = ("<s>", "<pad>", "</s>", "<unk>")
"""Its class numbers positions by where the token 1 is."""
PROMPTS = {"query": "find: ", "document": ""}

QWEN3 = SHAPE | {"head_dim": 32, "tie_word_embeddings": True}

Pool = Callable[[torch.Tensor], torch.Tensor]
POOLS: dict[str, Pool] = {
    "mean": lambda x: x.mean(0),
    "cls": lambda x: x[0],
    "lasttoken": lambda x: x[-1],
    "max": lambda x: x.max(0).values,
    "mean_sqrt_len_tokens": lambda x: x.sum(0) / len(x) ** 0.5,
    "weightedmean": lambda x: torch.arange(1.0, len(x) + 1) @ x / sum(range(len(x) + 1)),
}


def write_tokenizer(
    folder: Path, single: str, pair: str, special: Sequence[str] = SPECIAL
) -> tokenizers.Tokenizer:
    """Of bytes: ids 4 to 259 are bytes. single, pair: what stands around a text, and around two."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: k for k, text in enumerate([*special, *alphabet])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in SPECIAL])
    backend.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(text, vocab[text]) for text in SPECIAL]
    )
    backend.save(str(folder / "tokenizer.json"))
    roles = {"pad_token": "<pad>", "eos_token": "</s>", "bos_token": "<s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles))
    return backend


def write_modules(
    folder: Path,
    mode: str,
    *,
    width: int = 64,
    new_names: bool = False,
    normalize: bool = True,
    prompts: Mapping[str, str] | None = None,
    max_seq_length: int | None = None,
) -> None:
    """modules.json, pooling in the old or the new names, prompts."""
    names = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    base = "sentence_transformers.models"
    listed = [
        {"idx": k, "name": str(k), "path": path, "type": f"{base}.{name}"}
        for k, (name, path) in enumerate(zip(names, paths, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    old = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken"}
    pooling: dict[str, Any] = {"embedding_dimension": width, "pooling_mode": mode, "include_prompt": True}
    if not new_names:
        pooling = {f"pooling_mode_{name}": kind == mode for kind, name in old.items()}
        pooling |= {"word_embedding_dimension": width}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    told = {"prompts": dict(prompts or {}), "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(told))
    if max_seq_length is not None:
        sizes = {"max_seq_length": max_seq_length, "do_lower_case": False}
        (folder / "sentence_bert_config.json").write_text(json.dumps(sizes))


def write_qwen3_embedder(
    folder: Path, seed: str = "qwen3-embedding", prompts: Mapping[str, str] = PROMPTS, **changes: Any
) -> Any:
    """As Qwen3-Embedding is stored: a decoder without a head, whose tensors have no prefix."""
    config = transformers.Qwen3Config(**QWEN3 | changes)
    config._attn_implementation = "eager"
    model = drawn(transformers.Qwen3Model(config), seed)
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": ["Qwen3ForCausalLM"]}))
    write_tokenizer(folder, "$A </s>", "$A $B </s>")
    write_modules(folder, "lasttoken", prompts=prompts)
    return model


BERT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
}
MODERN = BERT | {"local_attention": 8, "max_position_embeddings": 256, "cls_token_id": 1, "sep_token_id": 2}
MODERN |= {"bos_token_id": 1, "eos_token_id": 2}
GEMMA = SHAPE | {
    "head_dim": 32,
    "query_pre_attn_scalar": 48,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 9,
    "use_bidirectional_attention": True,
    "max_position_embeddings": 256,
}
MPNET = BERT | {"pad_token_id": 1, "max_position_embeddings": 200}
DISTILBERT = {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "vocab_size": 320}
DISTILBERT |= {"max_position_embeddings": 66, "pad_token_id": 0}
ALBERT = BERT | {"embedding_size": 32, "num_hidden_layers": 4, "num_hidden_groups": 2}
DEBERTA = BERT | {
    "relative_attention": True,
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
ENCODERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "bert-mean": ("Bert", BERT, "mean"),
    "bert-cls": ("Bert", BERT | {"hidden_act": "gelu_new"}, "cls"),
    "xlm-roberta": ("XLMRoberta", BERT | {"pad_token_id": 3, "type_vocab_size": 1}, "cls"),
    "modernbert": ("ModernBert", MODERN, "mean"),
    "embedding-gemma": ("Gemma3Text", GEMMA, "mean"),
    "camembert": ("Camembert", BERT | {"pad_token_id": 1, "max_position_embeddings": 68}, "mean"),
    "electra": ("Electra", BERT | {"embedding_size": 48}, "cls"),
    "electra-base": ("Electra", BERT | {"embedding_size": 64}, "mean"),
    "mpnet": ("MPNet", MPNET, "mean"),
    "distilbert": ("DistilBert", DISTILBERT, "mean"),
    "albert": ("Albert", ALBERT, "mean"),
    "deberta-v2": ("DebertaV2", DEBERTA | {"position_biased_input": True, "pos_att_type": ["c2p"]}, "mean"),
    "deberta-v3": ("DebertaV2", DEBERTA, "mean"),
    "nomic-bert": ("NomicBert", BERT | {"max_position_embeddings": 128}, "mean"),
}
"""By name: the kind, its configuration, how it is pooled. The longest text of BERT has 66 tokens."""


def write_encoder(folder: Path, name: str, **changes: Any) -> Any:
    """An encoder with the files of sentence-transformers."""
    kind, settings, mode = ENCODERS[name]
    config = getattr(transformers, f"{kind}Config")(**settings | changes)
    config._attn_implementation = "eager"
    model = drawn(getattr(transformers, f"{kind}Model")(config), name)
    model.save_pretrained(folder)
    if "sliding_window" in settings:  # transformers counts a window of its own from it, and would save that
        raw = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(raw | {"sliding_window": settings["sliding_window"]}))
    write_tokenizer(folder, "<s> $A </s>", "<s> $A </s> $B:1 </s>:1")
    write_modules(folder, mode, new_names=name.startswith("xlm"), prompts=PROMPTS)
    return model


def write_m3(folder: Path, *, pickled: bool = False) -> tuple[Any, dict[str, torch.nn.Linear]]:
    """As BGE-M3: an encoder with products of tokens beside it. pickled: they are stored as it is published."""
    model = write_encoder(folder, "xlm-roberta")
    products = {"sparse_linear": torch.nn.Linear(64, 1), "colbert_linear": torch.nn.Linear(64, 24)}
    for k, (name, product) in enumerate(products.items()):
        generator = torch.Generator().manual_seed(k)
        with torch.no_grad():
            product.weight.normal_(0, 0.125, generator=generator)
            product.bias.normal_(0, 0.125, generator=generator)
        if pickled:
            torch.save(product.state_dict(), folder / f"{name}.pt")
        else:
            save_file(product.state_dict(), str(folder / f"{name}.safetensors"))
    return model, products


def reference(model: Any, ids: Sequence[int], mode: str, **more: Any) -> np.ndarray:
    """float32 [hidden]: the pooled last hidden states of transformers, not normalised."""
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), **more).last_hidden_state[0]
    return POOLS[mode](hidden).numpy()


def cosine(one: Any, two: Any) -> float:
    a, b = np.asarray(one, np.float64), np.asarray(two, np.float64)
    return float(a @ b / np.sqrt((a @ a) * (b @ b)))


CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("Bert", BERT),
    "xlm-roberta": ("XLMRoberta", BERT | {"pad_token_id": 3, "type_vocab_size": 1}),
    "modernbert-mean": ("ModernBert", MODERN | {"classifier_pooling": "mean"}),
    "modernbert-cls": ("ModernBert", MODERN | {"classifier_pooling": "cls"}),
    "qwen3": ("Qwen3", QWEN3 | {"pad_token_id": 0}),
    "electra": ("Electra", BERT | {"embedding_size": 48}),
    "mpnet": ("MPNet", MPNET),
    "distilbert": ("DistilBert", DISTILBERT),
    "albert": ("Albert", ALBERT),
    "deberta-v3": ("DebertaV2", DEBERTA),
}
"""By name: the kind, and its configuration."""

TEMPLATE = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}<s>"
RANKING_TEMPLATE = """<s>{{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first }}</s>
{{ messages | selectattr('role', 'eq', "document") | map(attribute='content') | first }}</s>"""
"""As sentence-transformers writes them for rerankers that generate."""


def write_classifier(folder: Path, name: str, n_labels: int = 1, **changes: Any) -> Any:
    """A classifier, with nothing beside it but a tokenizer that joins pairs."""
    kind, settings = CLASSIFIERS[name]
    config = getattr(transformers, f"{kind}Config")(**settings | {"num_labels": n_labels} | changes)
    config._attn_implementation = "eager"
    model = drawn(getattr(transformers, f"{kind}ForSequenceClassification")(config), name)
    model.save_pretrained(folder)
    special = OF_MPNET if name == "mpnet" else SPECIAL
    write_tokenizer(folder, "<s> $A </s>", "<s> $A </s> $B:1 </s>:1", special)
    if name == "qwen3":
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    return model


def write_judge(folder: Path, template: str = TEMPLATE, seed: str = "qwen3-reranker", **changes: Any) -> Any:
    """A model that generates, and has the tokens "yes" and "no"."""
    config = transformers.Qwen3Config(**QWEN3 | {"max_position_embeddings": 1024} | changes)
    config._attn_implementation = "eager"
    model = drawn(transformers.Qwen3ForCausalLM(config), seed)
    model.save_pretrained(folder)
    backend = write_tokenizer(folder, "$A", "$A $B")
    backend.add_tokens(["yes", "no"])
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return model
