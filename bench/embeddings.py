"""Vectors and scores of texts on the CPU, in turns with others.

Vectors: an encoder of MiniLM's shape, float32, mean of all tokens. The peers are transformers and OpenVINO, on
batches that are tokenized before, and sentence-transformers, each where it is installed. Ours is a request of the
engine, with its tokenizer. Scores: pairs that share their query, with the prefix cache and without.

    python -m bench.embeddings [--quick] [--json PATH]
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from bench import load
from bench.checkpoints import SMALL, checkpoint
from bench.report import NotAvailableError, Report, progress
from bench.runs import Bench, arguments, opened
from petiole.gpu_worker import Embedding, Engine, EngineConfig, Request, Scoring

VOCAB, WIDTH = 30_522, 384
BATCH = 32
TARGET_VECTORS, TARGET_REUSE = 1.1, 1.5
SPECIAL = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "yes", "no")
TEMPLATE = "{{ messages | map(attribute='content') | join(' ') }}"
NAME = "MiniLM-L6 shape, fp32"

Rate = Callable[[list[str]], float]
"""Texts a second of these texts."""


def main(argv: list[str] | None = None) -> None:
    options = arguments(__doc__).parse_args(argv)
    bench = opened("Vectors and scores of texts", options)
    vectors(bench)
    bench.report.save(options.json)
    scores(bench)
    bench.report.finish(options.json)


def vectors(bench: Bench) -> None:
    with tempfile.TemporaryDirectory(prefix="petiole-bench-") as name:
        folder = Path(name)
        write_encoder(folder)
        others = peers(folder, bench.report)
        if not others:
            return
        config = EngineConfig(model=name, device="cpu", dtype="float32", num_threads=bench.threads)
        with Engine(config) as engine:
            load.settle()

            def ours(texts: list[str]) -> float:
                began = time.perf_counter()
                engine.generate([Request(texts=texts, embedding=Embedding())])
                return len(texts) / (time.perf_counter() - began)

            for tokens, n in progress(bench.pick([(16, 16)], [(128, 128), (512, 32)]), "vectors"):
                texts = words(n, tokens - 2)
                for rate in (ours, *others.values()):
                    rate(texts[:BATCH])
                for peer, rate in others.items():
                    bench.report.compare(
                        f"{NAME}, {n} texts of {tokens} tokens, beside {peer}",
                        "texts/s",
                        lambda: ours(texts),  # noqa: B023
                        lambda: rate(texts),  # noqa: B023
                        rounds=bench.pick(1, 5),
                        target=TARGET_VECTORS,
                    )


def peers(folder: Path, report: Report) -> dict[str, Rate]:
    found: dict[str, Rate] = {}
    makers = {
        "transformers": transformers_rate,
        "sentence-transformers": sentences_rate,
        "OpenVINO": openvino_rate,
    }
    for name, make in makers.items():
        try:
            found[name] = make(folder)
        except NotAvailableError as error:
            report.absent[name] = str(error)
    return found


class Pooled(torch.nn.Module):
    """A model of transformers, up to vectors: the mean of all positions, normalised."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        try:
            from transformers import AutoModel
        except ImportError as error:
            raise NotAvailableError(f"not installed: {error.name}") from error
        self.model = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids).last_hidden_state
        return torch.nn.functional.normalize(hidden.mean(1))


def batched(folder: Path, vectors: Callable[[torch.Tensor], object]) -> Rate:
    """Tokenized before, in batches of one length, which are not padded."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def rate(texts: list[str]) -> float:
        ids = torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(texts)])
        began = time.perf_counter()
        for part in ids.split(BATCH):
            vectors(part)
        return len(texts) / (time.perf_counter() - began)

    return rate


def transformers_rate(folder: Path) -> Rate:
    model = Pooled(folder)

    def vectors(ids: torch.Tensor) -> object:
        with torch.inference_mode():
            return model(ids).numpy()

    return batched(folder, vectors)


def openvino_rate(folder: Path) -> Rate:
    """In the precision that it chooses for this processor, for the shortest latency."""
    try:
        import openvino
    except ImportError as error:
        raise NotAvailableError(f"not installed: {error.name}") from error
    ids = torch.ones(2, 16, dtype=torch.int64)
    with torch.no_grad():
        converted = openvino.convert_model(Pooled(folder), example_input=ids)
    how = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(converted, "CPU", how).create_infer_request()
    return batched(folder, lambda ids: request.infer([ids.numpy()])[0])


def sentences_rate(folder: Path) -> Rate:
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise NotAvailableError(f"not installed: {error.name}") from error
    model = SentenceTransformer(str(folder), device="cpu")

    def rate(texts: list[str]) -> float:
        began = time.perf_counter()
        model.encode(texts, batch_size=BATCH, show_progress_bar=False)
        return len(texts) / (time.perf_counter() - began)

    return rate


def scores(bench: Bench) -> None:
    """Pairs whose first half is one query."""
    n, half = bench.pick(4, 100), bench.pick(16, 128)
    query, documents = words(1, half)[0], words(n, half, seed=1)
    pairs = [(query, document) for document in documents]
    with checkpoint(SMALL) as name:
        write_tokenizer(Path(name), SMALL.vocab_size)
        config = EngineConfig(model=name, device="cpu", dtype="float32", num_threads=bench.threads)
        with Engine(config) as engine:
            load.settle()
            salts = iter(range(10**6))

            def rate(shared: bool) -> float:
                salt = str(next(salts))
                groups = [pairs] if shared else [[pair] for pair in pairs]
                began = time.perf_counter()
                engine.generate(
                    Request(texts=group, scoring=Scoring(), salt=f"{salt} {k}") for k, group in enumerate(groups)
                )
                return n / (time.perf_counter() - began)

            rate(True)
            bench.report.compare(
                f"{SMALL.name}, {n} pairs of {2 * half} tokens, {half} of them shared, beside no reuse",
                "pairs/s",
                lambda: rate(True),
                lambda: rate(False),
                rounds=bench.pick(1, 5),
                target=TARGET_REUSE,
            )


def words(n: int, length: int, seed: int = 0) -> list[str]:
    """Texts of this many words, which are a token each."""
    drawn = np.random.default_rng(seed).integers(len(SPECIAL), SMALL.vocab_size, (n, length))
    return [" ".join(f"w{number}" for number in line) for line in drawn.tolist()]


def write_tokenizer(folder: Path, vocab_size: int, around: Sequence[str] = ()) -> None:
    """Of words. around: the special tokens before and after a text."""
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


def write_encoder(folder: Path) -> None:
    """A BERT of MiniLM-L6's shape with random weights, and the files of sentence-transformers."""
    from safetensors.torch import save_file

    inner, generator = 4 * WIDTH, torch.Generator().manual_seed(0)

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size).normal_(0, 0.02, generator=generator)

    def norm(name: str) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": torch.ones(WIDTH), f"{name}.bias": torch.zeros(WIDTH)}

    def linear(name: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        return {f"{name}.weight": normal(outputs, inputs), f"{name}.bias": torch.zeros(outputs)}

    tensors = {
        "embeddings.word_embeddings.weight": normal(VOCAB, WIDTH),
        "embeddings.position_embeddings.weight": normal(512, WIDTH),
        "embeddings.token_type_embeddings.weight": normal(2, WIDTH),
        **norm("embeddings.LayerNorm"),
    }
    for k in range(6):
        at = f"encoder.layer.{k}"
        for name in ("query", "key", "value"):
            tensors |= linear(f"{at}.attention.self.{name}", WIDTH, WIDTH)
        tensors |= linear(f"{at}.attention.output.dense", WIDTH, WIDTH) | norm(f"{at}.attention.output.LayerNorm")
        tensors |= linear(f"{at}.intermediate.dense", inner, WIDTH)
        tensors |= linear(f"{at}.output.dense", WIDTH, inner) | norm(f"{at}.output.LayerNorm")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": inner, "num_hidden_layers": 6}
    kind = {"architectures": ["BertModel"], "model_type": "bert", "torch_dtype": "float32"}
    sizes |= {"num_attention_heads": 12, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps({**kind, **sizes}))
    write_tokenizer(folder, VOCAB, ("[CLS]", "[SEP]"))
    names = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")
    listed = [
        {"idx": k, "name": str(k), "path": path, "type": f"sentence_transformers.models.{name}"}
        for k, (name, path) in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": WIDTH, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 512, "do_lower_case": False}))


if __name__ == "__main__":
    main()
