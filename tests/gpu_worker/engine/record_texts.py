"""Writes what sentence-transformers makes of petiole-tiny-embed (`recorded_texts.json`), and a small reranker with
its scores. It runs under a Python with sentence-transformers, in the project's root:

    python tests/gpu_worker/engine/record_texts.py

The record in this folder is that of sentence-transformers 6.2.0 and transformers 5.5.4."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from transformers import BertConfig, BertForSequenceClassification

HERE = Path(__file__).parent
MODEL = HERE.parents[2] / "gpu_worker/models/petiole_tiny/embed"
RERANKER = HERE / "recorded_reranker.safetensors"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
TEXTS = [
    "the key is under the mat",
    "a dog sleeps",
    "what is behind the door?",
    "Where does the cat hide, and why?",
    "x",
    "one two three " * 12,
]
QUERY = "where is the key?"


def main() -> None:
    model = SentenceTransformer(str(MODEL), device="cpu", model_kwargs={"dtype": "float32"})
    width = model.get_embedding_dimension()
    made = {}
    for prompt in (None, "query", "passage"):
        for cut in (width, width // 2):
            found = model.encode(TEXTS, prompt_name=prompt, truncate_dim=cut, normalize_embeddings=True)
            made[f"{prompt} {cut}"] = [[round(float(number), 7) for number in row] for row in found]
    with tempfile.TemporaryDirectory() as folder:
        reranker(Path(folder))
        scores = CrossEncoder(folder, device="cpu").predict([(QUERY, text) for text in TEXTS])
        described = json.loads((Path(folder) / "config.json").read_text())
        shutil.copyfile(Path(folder) / "model.safetensors", RERANKER)
    record = {"texts": TEXTS, "vectors": made, "query": QUERY, "scores": [round(float(one), 7) for one in scores]}
    record |= {"reranker": described}
    (HERE / "recorded_texts.json").write_text(json.dumps(record) + "\n")


def reranker(folder: Path) -> None:
    torch.manual_seed(0)
    vocabulary = json.loads((MODEL / "config.json").read_text())["vocab_size"]
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=vocabulary, max_position_embeddings=96, num_labels=1, **sizes)
    model = BertForSequenceClassification(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.4)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copyfile(MODEL / name, folder / name)


if __name__ == "__main__":
    main()
