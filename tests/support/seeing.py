"""Small models that see, with drawn weights, in the published layouts: with a tokenizer and a chat template."""

from __future__ import annotations

import json
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import AddedToken

from tests.support.families import _FULL, _LINEAR, _LOCAL, _MIXED
from tests.support.tokenizers import byte_level

transformers = pytest.importorskip("transformers")

MARKS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>", "[IMG_BREAK]", "[IMG_END]"]
_PLACES = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
MARKS += ["<fake_token_around_image>", "<global-img>", *_PLACES]
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for content in message.content %}
            {%- if content.type == 'image' or 'image' in content or 'image_url' in content %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif content.type == 'video' or 'video' in content %}
                {{- '<|vision_start|><|video_pad|><|vision_end|>' }}
            {%- elif 'text' in content %}
                {{- content.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""As Qwen3-VL's, without tools."""
SMOL_TEMPLATE = """\
<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}\
{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}\
{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}\
{% elif line['type'] == 'image' %}{{ '<|image_pad|>' }}{% endif %}{% endfor %}<end_of_utterance>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""
"""SmolVLM2's, which reads parts alone."""
PIXELS = {"shortest_edge": 1024, "longest_edge": 2**20}


def tokenizer() -> Any:
    made = byte_level()
    made.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return made


TOKENS = {mark: tokenizer().token_to_id(mark) for mark in MARKS}
PAD, VIDEO_PAD = TOKENS["<|image_pad|>"], TOKENS["<|video_pad|>"]
VOCAB = 512


def _text(sections: list[int], **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections, "mrope_interleaved": True}
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "eos_token_id": 0,
        "bos_token_id": 1,
        "pad_token_id": None,
        "rope_parameters": rope,
        **more,
    }


_TOWER: dict[str, Any] = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 3,
    "out_hidden_size": 64,
    "num_position_embeddings": 49,
    "deepstack_visual_indexes": [0, 2],
}
_IDS = {
    "image_token_id": PAD,
    "video_token_id": TOKENS["<|video_pad|>"],
    "vision_start_token_id": TOKENS["<|vision_start|>"],
    "vision_end_token_id": TOKENS["<|vision_end|>"],
}
_BEGIN, _END = TOKENS["<|vision_start|>"], TOKENS["<|vision_end|>"]
_MORE = {
    "Gemma3": {
        "mm_tokens_per_image": 16,
        "image_token_index": PAD,
        "boi_token_index": _BEGIN,
        "eoi_token_index": _END,
    },
    "Mistral3": {"image_token_id": PAD, "multimodal_projector_bias": True},
    "Gemma4": {"image_token_id": PAD, "boi_token_id": _BEGIN, "eoi_token_id": _END, "audio_config": None},
    "SmolVLM": {"image_token_id": PAD, "scale_factor": 2},
}
"""By class: what the whole model's configuration has, if not the same as Qwen's."""
_QWEN3_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TOWER_3_5 = {key: value for key, value in _TOWER.items() if key != "deepstack_visual_indexes"}
_TOWER_2_5 = {
    "depth": 4,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_heads": 3,
    "out_hidden_size": 64,
    "patch_size": 16,
    "window_size": 64,
    "fullatt_block_indexes": [1, 3],
}
_GEMMA: dict[str, Any] = {
    "rope_parameters": {
        _LOCAL: {"rope_type": "default", "rope_theta": 10_000.0},
        _FULL: {"rope_type": "default", "rope_theta": 100_000.0},
    },
    "sliding_window": 7,
    "layer_types": [_LOCAL, _FULL, _LOCAL, _FULL],
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
_GEMMA3 = _GEMMA | {"query_pre_attn_scalar": 20}
_SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 64,
    "patch_size": 8,
    "vision_use_head": False,
}
_GEMMA4 = _GEMMA | {
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "final_logit_softcapping": 5.0,
}
_TOWER_4 = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "patch_size": 8,
    "position_embedding_size": 256,
    "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 160,
    "patch_size": 8,
}
_SMOL = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "image_size": 48,
    "patch_size": 8,
}
_ONE_AXIS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
_AHEAD = {"use_bidirectional_attention": "vision"}
_PER_LAYER = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
_EXPERTS = {"enable_moe_block": True, "num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 32}
SEEING: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl": ("Qwen3VL", _text([6, 5, 5], tie_word_embeddings=True), _TOWER),
    "qwen3-vl-untied": ("Qwen3VL", _text([6, 5, 5]), _TOWER | {"deepstack_visual_indexes": [0, 1, 3]}),
    "qwen3-vl-moe": ("Qwen3VLMoe", _text([6, 5, 5], **_QWEN3_MOE), _TOWER),
    "qwen3.5": ("Qwen3_5", _text([2, 1, 1], **_LINEAR), _TOWER_3_5),
    "qwen3.5-moe": ("Qwen3_5Moe", _text([2, 1, 1], **_LINEAR | _MIXED), _TOWER_3_5),
    "qwen2.5-vl": ("Qwen2_5_VL", _text([2, 3, 3], head_dim=16), _TOWER_2_5),
    "mistral3": ("Mistral3", _text([], model_type="mistral", **_ONE_AXIS), _PIXTRAL),
    "smolvlm": ("SmolVLM", _text([], model_type="llama", **_ONE_AXIS), _SMOL),
    "gemma3": ("Gemma3", _text([], **_GEMMA3), _SIGLIP),
    "gemma4": ("Gemma4", _text([], **_GEMMA4 | _AHEAD), _TOWER_4 | {"standardize": True}),
    "gemma4-per-layer": ("Gemma4", _text([], **_GEMMA4 | _PER_LAYER), _TOWER_4 | {"use_clipped_linears": True}),
    "gemma4-experts": ("Gemma4", _text([], **_GEMMA4 | _AHEAD | _EXPERTS), _TOWER_4),
}
"""By name: the class, the text part and the tower."""


def seeing_model(name: str) -> Any:
    kind, text, tower = SEEING[name]
    config = getattr(transformers, f"{kind}Config")(
        text_config=text,
        vision_config=tower,
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        **_MORE.get(kind, _IDS),
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    rng = np.random.RandomState(7)
    with torch.no_grad():
        for key, weight in sorted(model.state_dict().items()):
            drawn = torch.from_numpy(rng.standard_normal(tuple(weight.shape)).astype(np.float32))
            if weight.ndim == 1:
                drawn = 0.3 * drawn + ("norm" in key and key.endswith("weight"))
            elif weight.ndim == 0:
                drawn = drawn.abs() * (2.0 if key.endswith("max") else -2.0 if key.endswith("min") else 1.0)
            elif "embed" not in key or "embed_vision" in key:
                drawn = 1.3 * drawn / weight[0].numel() ** 0.5
            weight.copy_(drawn)
    return model


def pixels_of_transformers(**more: Any) -> Any:
    """The processor that needs no torchvision."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    given = {"size": PIXELS, "patch_size": 16, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.3, 0.2]}
    return Qwen2VLImageProcessorPil(**given | more)


def gemma_pixels(kind: str) -> Any:
    """As `pixels_of_transformers`."""
    if kind == "Gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(size={"height": 64, "width": 64}, image_std=[0.5, 0.3, 0.2])
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(patch_size=8, max_soft_tokens=70)


def row_pixels() -> Any:
    """As `pixels_of_transformers`. Its processor's patches are blocks."""
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

    return PixtralImageProcessorPil(size={"longest_edge": 160}, patch_size=16, image_mean=[0.5, 0.4, 0.3])


def tile_pixels(tile: int = 48) -> Any:
    """As `pixels_of_transformers`."""
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    edges: dict[str, Any] = {"size": {"longest_edge": 120}, "max_image_size": {"longest_edge": tile}}
    return SmolVLMImageProcessorPil(**edges, image_mean=[0.5, 0.4, 0.3])


def pixels_of(model: Any) -> Any:
    """The processor of a model's pictures."""
    kind = type(model).__name__.removesuffix("ForConditionalGeneration")
    if kind == "SmolVLM":
        return tile_pixels()
    if kind == "Mistral3":
        return row_pixels()
    return gemma_pixels(kind) if kind in _MORE else pixels_of_transformers()


def write_seeing(folder: Path, name: str, model: Any = None) -> Any:
    """The model, which `folder` has then."""
    model = seeing_model(name) if model is None else model
    model.save_pretrained(folder)
    pixels_of(model).save_pretrained(folder)
    if type(model).__name__.startswith("Mistral3"):  # whose files name the tower's patches
        described = json.loads((folder / "preprocessor_config.json").read_text())
        sides = {"patch_size": {"height": 8, "width": 8}}
        (folder / "preprocessor_config.json").write_text(json.dumps(described | sides))
    tokenizer().save(str(folder / "tokenizer.json"))
    template = TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", mark_of(model))
    if type(model).__name__.startswith("SmolVLM"):
        template = SMOL_TEMPLATE
    described = {"eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return model


def mark_of(model: Any) -> str:
    """What a chat template writes for a picture."""
    kind = type(model).__name__.removesuffix("ForConditionalGeneration")
    return {"Gemma3": "<|vision_start|>", "Gemma4": "<|image_pad|>"}.get(
        kind, "<|image_pad|>" if kind in ("Mistral3", "SmolVLM") else "".join(MARKS[:3])
    )


def drawn_picture(width: int, height: int, seed: int = 0) -> Image.Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (9, 13, 3)).astype(np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


def as_file(picture: Image.Image, **more: Any) -> bytes:
    file = BytesIO()
    picture.save(file, "PNG", **more)
    return file.getvalue()


def drawn_film(
    frames: int = 40, rate: int = 10, kind: str = "mp4", codec: str = "mpeg4", size: tuple[int, int] = (96, 64)
) -> bytes:
    """The file of a video."""
    av: Any = pytest.importorskip("av")
    file = BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=Fraction(rate))
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for k in range(frames):
            container.mux(stream.encode(av.VideoFrame.from_image(drawn_picture(*size, seed=k))))
        container.mux(stream.encode())
    return file.getvalue()


def smol_ids(rows: int, columns: int) -> list[int]:
    """The tokens of a picture in tiles, as transformers' processor writes them."""
    from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

    names = {"fake_token_around_image": MARKS[6], "image_token": MARKS[1], "global_image_token": MARKS[7]}
    ids: list[int] = tokenizer().encode(get_image_prompt_string(rows, columns, 9, **names)).ids
    return ids


def reference(model: Any, ids: list[int], pictures: list[Image.Image]) -> np.ndarray:
    """float64 [positions, vocab]: log-probabilities. ids: with one placeholder for each picture."""
    smol, more = type(model).__name__.startswith("SmolVLM"), dict[str, Any]()
    if smol:
        more = {"images": [pictures], "return_row_col_info": True}
    made = dict(pixels_of(model)(**{"images": pictures, **more}, return_tensors="pt")) if pictures else {}
    made.pop("num_crops", None)
    counts = made.pop("num_soft_tokens_per_image", None)
    if counts is None:
        counts = [int(grid.prod()) // 4 for grid in made.get("image_grid_thw", ())] or [16] * len(pictures)
    places = iter([[PAD] * int(count) for count in counts])
    if type(model).__name__.startswith("Mistral3"):
        rows = [(int(height) // 16, int(width) // 16) for height, width in made.get("image_sizes", ())]
        between, last = TOKENS["[IMG_BREAK]"], TOKENS["[IMG_END]"]
        places = iter([[*([*[PAD] * n, between] * k)[:-1], last] for k, n in rows])
    if smol and pictures:
        places = iter(smol_ids(k, n) for k, n in zip(made.pop("rows")[0], made.pop("cols")[0], strict=True))
    whole = [token for one in ids for token in (next(places) if one == PAD else [one])]
    tokens = torch.tensor([whole])
    kinds = "token_type_ids" if type(model).__name__.startswith("Gemma3") else "mm_token_type_ids"
    with torch.no_grad():
        more = {kinds: (tokens == PAD).int()} if pictures and "image_sizes" not in made and not smol else {}
        logits = model(tokens, attention_mask=torch.ones_like(tokens), **made, **more).logits[0]
    return logits.double().log_softmax(-1).numpy()
