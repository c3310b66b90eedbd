"""Architectures of GGUF files: where Hugging Face's checkpoints keep the same tensors, and what llama.cpp's
converter has changed in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
FREQUENCIES = "rope_freqs.weight"
"""What the frequencies of the rotation are divided by, where they are scaled as in Llama 3.1."""

_IN_LAYER = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Architecture:
    """hub: as config.json names it. layer: names of a layer's tensors. turned: the rows of queries and keys are in
    the order of rotated pairs. norms_with_one: norms are stored as 1 + w."""

    hub: str
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    turned: bool = False
    norms_with_one: bool = False

    def name_of(self, name: str) -> str | None:
        """The name in Hugging Face's checkpoints; None if there is no such tensor."""
        if (found := _IN_LAYER.fullmatch(name)) is None:
            return _WHOLE.get(name)
        layer, part, kind = found.groups()
        return f"model.layers.{int(layer)}.{self.layer[part]}.{kind}" if part in self.layer else None

    def order(self, name: str) -> str | None:
        """Whose heads the rows of this tensor of Hugging Face belong to: "q", "k", or None where the rows are as
        they are."""
        found = re.search(r"\.self_attn\.([qk])_proj\.", name)
        return found[1] if self.turned and found else None


ARCHITECTURES = {
    "llama": Architecture("LlamaForCausalLM", turned=True),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM", layer={**_LAYER, **_NORMS}),
    "gemma3": Architecture(
        "Gemma3ForCausalLM",
        layer={
            **_LAYER,
            **_NORMS,
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        norms_with_one=True,
    ),
}
"""By `general.architecture`."""
