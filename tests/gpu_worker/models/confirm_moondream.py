"""Compare with the reference: `python tests/gpu_worker/models/confirm_moondream.py <folder of vikhyat/moondream>`.

Run by hand, since nothing of the reference is part of this project; last with revision 44146f1. Both get the
same drawn weights in float32 and the same uint8 crops. Compared are crops, encoder features, image embeddings and,
with forced token kinds through the engine, hidden states, logits and bins. What `test_moondream.py` keeps was
recorded by this program (`--record`) after all of that agreed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[3])]

from petiole.gpu_worker.models.moondream.crops import cropped  # noqa: E402
from tests.gpu_worker.models.test_moondream import RECORD, answer, digest, open_decoder  # noqa: E402
from tests.support.moondream import (  # noqa: E402
    KINDS,
    NARROW,
    PROMPT,
    exact_crops,
    picture,
    prepared,
    weights,
    write_model,
)

PICTURES = [(800, 600), (310, 500), (500, 1400)]


class NoTokenizer:
    @staticmethod
    def from_pretrained(name: str) -> NoTokenizer:
        return NoTokenizer()


def agrees(what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    error = float((ours - theirs).abs().max() / theirs.abs().max())
    print(f"  {what}: {error:.1e}")
    assert error < 1e-4, what


def reference_model() -> Any:
    import tokenizers

    tokenizers.Tokenizer = NoTokenizer
    from moondream.torch.config import MoondreamConfig
    from moondream.torch.moondream import MoondreamModel

    model = MoondreamModel(MoondreamConfig.from_dict(NARROW), dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights(), strict=False)
    assert not unexpected
    assert not [name for name in missing if "kv_cache" not in name], missing
    return model


def their_answer(model: Any, embeddings: torch.Tensor) -> tuple[list[tuple[int, ...]], torch.Tensor, torch.Tensor]:
    """Bins, hidden states and logits with the tokens of KINDS forced."""
    from moondream.torch import region, text

    model._run_vision_encoder = lambda image: embeddings
    model._setup_caches()
    at = model.encode_image(picture(8, 8), None).pos
    inputs = text.text_encoder(torch.tensor([PROMPT]), model.text)
    hidden = model._prefill(
        inputs, model.attn_mask[:, :, at : at + len(PROMPT)], torch.arange(at, at + len(PROMPT)), None
    )
    at += len(PROMPT)
    mask = torch.zeros(1, 1, 2048, dtype=torch.bool)
    mask[..., :at] = True
    bins, states, logits = [], [hidden[0, -1]], [text.lm_head(hidden, model.text)[0]]
    for kind in KINDS:
        last = hidden[:, -1:]
        if kind == 5:
            found = region.decode_coordinate(last, model.region).argmax(-1)
            bins.append((int(found),))
            embedded = region.encode_coordinate(found.float() / 1024, model.region)
        else:
            sides = region.decode_size(last, model.region).argmax(-1)
            bins.append(tuple(sides.tolist()))
            embedded = region.encode_size(torch.pow(2.0, sides.float() / 1023.0 * 10.0 - 10.0), model.region)
        mask[..., at] = True
        one, hidden = model._decode_one_tok(embedded.view(1, 1, -1), mask, torch.tensor([at]), None)
        at += 1
        states.append(hidden[0, -1])
        logits.append(one[0])
    return bins, torch.stack(states), torch.stack(logits)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("reference", type=Path)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    sys.path.insert(0, str(args.reference))
    torch.set_grad_enabled(False)
    model = reference_model()
    from moondream.torch.image_crops import overlap_crop_image, reconstruct_from_crops

    folder = write_model(Path(tempfile.mkdtemp()))
    ours = open_decoder(folder)
    cases = []
    for size in PICTURES:
        one = picture(*size)
        theirs = overlap_crop_image(np.array(one), max_crops=12, overlap_margin=4)
        mine = cropped(one, ours.config.vision.geometry)
        assert tuple(theirs["tiling"]) == mine.tiling
        assert (theirs["crops"] == mine.pixels).all()
        cases.append((f"{size}", mine.pixels, mine.tiling))
    cases.append(("exact crops", exact_crops(), (1, 2)))
    for name, pixels, tiling in cases:
        print(name, tiling)
        values = torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()).float().div_(255.0).sub_(0.5).div_(0.5)
        features = model._vis_enc(values)
        agrees("features", ours.vision.features(torch.from_numpy(pixels)).flatten(1, 2), features)
        whole = reconstruct_from_crops(features[1:].view(-1, 27, 27, 64), tiling, patch_size=1, overlap_margin=4)
        embeddings = model._vis_proj(features[0], whole)
        agrees("embeddings", ours.encode([(torch.from_numpy(pixels), tiling)])[0][0], embeddings)
        bins, states, logits = their_answer(model, embeddings)
        for cache in ("radix", "off"):
            found = answer(folder, prepared(pixels, tiling), prefix_cache=cache)
            agrees("hidden states", found.hidden, states)
            agrees("logits", found.logits, logits)
            assert found.bins == bins
    if args.record:
        RECORD.write_text(json.dumps(digest(folder), indent=1) + "\n")


if __name__ == "__main__":
    main()
