"""The nats of the long text by transformers in float32, on the weights of a GGUF file as it dequantises them:

python -m tests.real.record_float32 MODEL.gguf"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from petiole.gpu_worker.text.tokenizer_files import load_tokenizer
from tests.real.record import HERE, windows


def main() -> None:
    from transformers import AutoModelForCausalLM

    path, text = Path(sys.argv[1]), (HERE / "long_text.txt").read_text()
    tokenizer = load_tokenizer(path)
    whole, plain = tokenizer.encode(text), tokenizer.encode(text, add_special_tokens=False)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    total, n = 0.0, 0
    for tokens in windows(plain, whole[: len(whole) - len(plain)]):
        ids = torch.tensor(tokens)
        with torch.inference_mode():
            logits = model(ids[None]).logits[0, :-1].double()
        total += float(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="sum"))
        n += len(tokens) - 1
    print(json.dumps({"float32": [round(total, 3), n]}))


if __name__ == "__main__":
    main()
