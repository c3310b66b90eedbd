"""Moondream's reference implementation. It can only answer one question at a time.

`BENCH_MOONDREAM` names a checkout of github.com/vikhyat/moondream. The reference would download weights and
tokenizer; here it gets those of the measured checkpoint."""

from __future__ import annotations

import os
import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import tokenizers
import torch
from PIL import Image
from safetensors.torch import load_file

from bench.harness.report import NotAvailableError


class Reference:
    def __init__(self, checkpoint: Path, config: dict[str, dict[str, int]]) -> None:
        """Raises NotAvailableError."""
        if not (folder := os.environ.get("BENCH_MOONDREAM")):
            raise NotAvailableError("BENCH_MOONDREAM does not name a checkout of it")
        tokenizer = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        here = SimpleNamespace(from_pretrained=lambda name: tokenizer)
        try:
            with patch.object(tokenizers, "Tokenizer", here), patch.object(sys, "path", [folder, *sys.path]):
                from moondream.torch.config import MoondreamConfig
                from moondream.torch.moondream import MoondreamModel

                with torch.device("meta"):
                    empty: Any = MoondreamModel(MoondreamConfig.from_dict(config), setup_caches=False)
        except ImportError as error:
            raise NotAvailableError(f"{folder}: {error}") from None
        self._model = _filled(empty, checkpoint)

    def query(self, data: bytes, question: str, tokens: int) -> None:
        settings = {"temperature": 0, "max_tokens": tokens, "variant": None}
        self._model.query(Image.open(BytesIO(data)), question, settings=settings)


def _filled(model: Any, checkpoint: Path) -> Any:
    """The model with these weights in place of its empty ones, and with its own constants."""
    from moondream.torch.rope import precompute_freqs_cis

    tensors = load_file(checkpoint / "model.safetensors")
    found = model.load_state_dict(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items()}, strict=False, assign=True
    )
    assert not found.unexpected_keys, found.unexpected_keys
    assert not found.missing_keys, found.missing_keys
    text, context = model.config.text, model.config.text.max_context
    model.text.freqs_cis = precompute_freqs_cis(text.dim // (2 * text.n_heads), context)
    mask = torch.tril(torch.ones(1, 1, context, context, dtype=torch.bool))
    region = 1 + (model.config.vision.crop_size // model.config.vision.enc_patch_size) ** 2
    mask[..., :region, :region] = True
    model.attn_mask = mask
    model._setup_caches()
    return model.eval()
