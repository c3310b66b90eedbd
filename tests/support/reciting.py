"""A small gpt-oss as it is released: MXFP4 experts, sinks, harmony's template and end tokens. It says one given
thing, token by token, whatever it is asked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from tests.support.chat_templates import STYLES

ENDS = ("<|return|>", "<|call|>", "<|endoftext|>")
MARKS = ("<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|end|>", *ENDS)
WORDS = ("assistant", "user", "analysis", "commentary", "final", "json", " to=functions.now ", "{}")
EXPERTS, CHOSEN = 4, 2

_HIDDEN, _INNER, _HEAD, _LAYERS = 384, 64, 32, 2
_SEEN, _SCRATCH = 320, 352
"""Of the hidden numbers, the first are for the token at hand; from `_SEEN` on, for tokens that were seen before;
from `_SCRATCH` on, for what experts write, and nobody reads."""


def reciting(folder: Path, says: Sequence[str]) -> Path:
    """The folder, with a model that says these tokens: marks, words and single characters. A token may stand there
    twice and have another successor the second time. All comes within forty tokens of the prompt's beginning, if
    it does."""
    folder.mkdir()
    tokenizer = _tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": _HEAD,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "mxfp4"},
    }
    ends = [tokenizer.token_to_id(end) for end in ENDS]
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": ends},
        "tokenizer_config.json": {"chat_template": STYLES["harmony"].source, "eos_token": "<|return|>"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    ids = [tokenizer.token_to_id(token) for token in ("assistant", *says)]
    assert None not in ids
    save_file(_tensors(tokenizer.get_vocab_size(), ids), str(folder / "model.safetensors"))
    return folder


def _tokenizer() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(MARKS))
    made.add_tokens([AddedToken(word, normalized=False) for word in WORDS])
    return made


def _tensors(vocab: int, said: Sequence[int]) -> dict[str, Tensor]:
    """The embedding of a token is a unit vector, and the head has a row of weights for each successor. Attention
    gives each position the share of the tokens in `seen` among those before it."""
    assert vocab <= _SEEN
    torch.manual_seed(0)
    embedding, head = torch.eye(vocab, _HIDDEN), torch.zeros(vocab, _HIDDEN)
    seen: list[int] = []
    after: dict[int, int] = {}
    for token, successor in pairwise(said):
        first = after.setdefault(token, successor)
        head[first, token] = 3.0
        if first == successor:
            continue
        head[successor, token] = 2.5
        head[successor, _SEEN + len(seen)] = 20.0  # enough, where the first successor was seen
        seen.append(first)
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(_HIDDEN),
    }
    for i in range(_LAYERS):
        tensors |= {f"model.layers.{i}.{name}": one for name, one in _layer(seen if i == 0 else []).items()}
    kept = (torch.uint8,)
    return {name: (one if one.dtype in kept else one.bfloat16()).contiguous() for name, one in tensors.items()}


def _layer(seen: Sequence[int]) -> dict[str, Tensor]:
    """Queries and keys are zero, so all positions count alike, and the sinks hardly. Experts write where nobody
    reads."""
    values, out = torch.zeros(_HEAD, _HIDDEN), torch.zeros(_HIDDEN, 2 * _HEAD)
    for i, token in enumerate(seen):
        values[i, token], out[_SEEN + i, i] = 1.0, _HIDDEN**-0.5  # of which the norm makes the root of the width
    down, down_scales = _blocks(_HIDDEN, _INNER)
    down[:, :_SCRATCH] = 0
    up, up_scales = _blocks(2 * _INNER, _HIDDEN)
    return {
        "input_layernorm.weight": torch.ones(_HIDDEN),
        "post_attention_layernorm.weight": torch.ones(_HIDDEN),
        "self_attn.q_proj.weight": torch.zeros(2 * _HEAD, _HIDDEN),
        "self_attn.q_proj.bias": torch.zeros(2 * _HEAD),
        "self_attn.k_proj.weight": torch.zeros(_HEAD, _HIDDEN),
        "self_attn.k_proj.bias": torch.zeros(_HEAD),
        "self_attn.v_proj.weight": values,
        "self_attn.v_proj.bias": torch.zeros(_HEAD),
        "self_attn.o_proj.weight": out,
        "self_attn.o_proj.bias": torch.zeros(_HIDDEN),
        "self_attn.sinks": torch.full((2,), -20.0),
        "mlp.router.weight": torch.randn(EXPERTS, _HIDDEN),
        "mlp.router.bias": torch.randn(EXPERTS),
        "mlp.experts.gate_up_proj_blocks": up,
        "mlp.experts.gate_up_proj_scales": up_scales,
        "mlp.experts.gate_up_proj_bias": torch.randn(EXPERTS, 2 * _INNER),
        "mlp.experts.down_proj_blocks": down,
        "mlp.experts.down_proj_scales": down_scales,
        "mlp.experts.down_proj_bias": torch.zeros(EXPERTS, _HIDDEN),
    }


def _blocks(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Random MXFP4 of all experts, with small scales."""
    blocks = torch.randint(0, 256, (EXPERTS, outputs, inputs // 32, 16), dtype=torch.uint8)
    return blocks, torch.full((EXPERTS, outputs, inputs // 32), 120, dtype=torch.uint8)
