"""transformers over one question about a picture: its processor without torchvision, then `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from PIL import Image

from bench.harness.report import NotAvailableError


class Eyes:
    """A Qwen3-VL on the CPU, on as many threads as torch has."""

    def __init__(self, folder: Path) -> None:
        """Raises NotAvailableError."""
        try:
            import torch
            from transformers import Qwen3VLForConditionalGeneration
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
        except ImportError as error:
            raise NotAvailableError(f"not installed: {error.name}") from error
        self._pictures = Qwen2VLImageProcessorPil.from_pretrained(folder)
        made = Qwen3VLForConditionalGeneration.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        self._model = made.eval()

    def answer(self, data: bytes, ids: Sequence[int], pad: int, tokens: int) -> None:
        """ids: the prompt's, with `pad` for each position of the picture."""
        import torch

        picture = Image.open(BytesIO(data)).convert("RGB")
        made = dict(self._pictures(images=[picture], return_tensors="pt"))
        tokens_of_prompt = torch.tensor([ids])
        with torch.inference_mode():
            self._model.generate(
                input_ids=tokens_of_prompt,
                attention_mask=torch.ones_like(tokens_of_prompt),
                mm_token_type_ids=(tokens_of_prompt == pad).int(),
                **made,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=0,
            )
