"""The child process of `texts.py`: vectors of texts by other libraries. It imports nothing of this project,
because it runs under the peers' Python.

Each peer knows a few settings, all of which its users may choose: how many texts are in a batch, and whether all
threads compute one batch or each its own. The first load of a length is computed with each setting, and later
loads with the quickest."""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path[:] = [
    at for at in sys.path if at != str(Path(__file__).parent)
]  # modules beside this file are no packages

import numpy as np  # noqa: E402
import torch  # noqa: E402

Arrays = Sequence[Any]
Compute = Callable[[Sequence[str]], Any]
"""float32 [texts, width], of texts of one length."""

BATCHES = (4, 32)


class Pooled(torch.nn.Module):
    """A model of transformers up to vectors: the mean of all positions, or the first one, normalised."""

    def __init__(self, folder: str, first: bool) -> None:
        super().__init__()
        from transformers import AutoModel

        self.model, self.first = AutoModel.from_pretrained(folder).eval(), first

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden = self.model(input_ids).last_hidden_state
        return torch.nn.functional.normalize(hidden[:, 0] if self.first else hidden.mean(1))


class Plain(torch.nn.Module):
    """The same in the operations that ONNX Runtime's optimizer looks for, over a model's own weights."""

    def __init__(self, pooled: Pooled) -> None:
        super().__init__()
        self.first, self.bert = pooled.first, pooled.model
        config = pooled.model.config
        self.heads, self.width = config.num_attention_heads, config.hidden_size // config.num_attention_heads
        self.before = config.pad_token_id + 1 if config.model_type == "xlm-roberta" else 0

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.size(0), x.size(1), self.heads, self.width).permute(0, 2, 1, 3)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        given = self.bert.embeddings
        positions = torch.arange(input_ids.size(1)) + self.before
        x = given.word_embeddings(input_ids) + given.token_type_embeddings.weight[0]
        x = given.LayerNorm(x + given.position_embeddings(positions))
        for layer in self.bert.encoder.layer:
            own = layer.attention.self
            q, k, v = (self.split(linear(x)) for linear in (own.query, own.key, own.value))
            scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.width)
            mixed = torch.matmul(torch.softmax(scores, -1), v).permute(0, 2, 1, 3).contiguous()
            mixed = mixed.view(mixed.size(0), mixed.size(1), self.heads * self.width)
            x = layer.attention.output.LayerNorm(layer.attention.output.dense(mixed) + x)
            inner = torch.nn.functional.gelu(layer.intermediate.dense(x))
            x = layer.output.LayerNorm(layer.output.dense(inner) + x)
        return torch.nn.functional.normalize(x[:, 0] if self.first else x.mean(1))


class Tokens:
    """Token ids of texts of one length, cut into batches. They are tokenized before the clock runs."""

    def __init__(self, folder: str) -> None:
        from tokenizers import Tokenizer

        self.tokenizer, self.known = Tokenizer.from_file(f"{folder}/tokenizer.json"), dict[str, list[int]]()

    def of(self, texts: Sequence[str]) -> Any:
        new = [text for text in texts if text not in self.known]
        self.known |= {
            text: encoding.ids for text, encoding in zip(new, self.tokenizer.encode_batch(new), strict=True)
        }
        return np.array([self.known[text] for text in texts], np.int64)

    def batches(self, texts: Sequence[str], size: int) -> list[Any]:
        ids = self.of(texts)
        return [ids[at : at + size] for at in range(0, len(ids), size)]


def sentence_transformers(asked: dict[str, Any], tokens: Tokens) -> dict[str, Compute]:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(asked["folder"], device="cpu")
    encode = partial(model.encode, show_progress_bar=False)
    return {f"batches of {size}": partial(encode, batch_size=size) for size in BATCHES}


def openvino(asked: dict[str, Any], tokens: Tokens) -> dict[str, Compute]:
    """In bfloat16 where that is asked for, else in float32."""
    import openvino as ov

    with torch.no_grad():
        ids = torch.ones(2, 16, dtype=torch.int64)
        pooled = Pooled(asked["folder"], asked["first"])
        try:
            converted = ov.convert_model(pooled, example_input=ids)
        except RuntimeError:  # some versions of transformers cannot be traced
            converted = ov.convert_model(Plain(pooled).eval(), example_input=ids)
    core = ov.Core()
    threads = {
        "INFERENCE_NUM_THREADS": asked["threads"],
        "INFERENCE_PRECISION_HINT": {"bfloat16": "bf16", "float32": "f32"}[asked["dtype"]],
    }
    together = core.compile_model(converted, "CPU", {**threads, "PERFORMANCE_HINT": "LATENCY"})
    streams = {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": asked["threads"]}
    apart = core.compile_model(converted, "CPU", {**threads, **streams})
    request, queue = together.create_infer_request(), ov.AsyncInferQueue(apart, asked["threads"])
    made: dict[int, Any] = {}
    queue.set_callback(lambda done, at: made.__setitem__(at, done.get_output_tensor(0).data.copy()))

    def one_by_one(size: int, texts: Sequence[str]) -> Any:
        return np.concatenate([request.infer([ids])[0].copy() for ids in tokens.batches(texts, size)])

    def side_by_side(size: int, texts: Sequence[str]) -> Any:
        made.clear()
        for at, ids in enumerate(tokens.batches(texts, size)):
            queue.start_async([ids], at)
        queue.wait_all()
        return np.concatenate([made[at] for at in sorted(made)])

    return {
        **{f"all threads, batches of {size}": partial(one_by_one, size) for size in BATCHES},
        **{f"a thread for each batch of {size}": partial(side_by_side, size) for size in (1, 4)},
    }


def onnxruntime(asked: dict[str, Any], tokens: Tokens) -> dict[str, Compute]:
    """In float32, with its transformer optimizer."""
    import onnxruntime as ort
    from onnxruntime.transformers.optimizer import optimize_model

    with tempfile.TemporaryDirectory(prefix="petiole-onnx-") as scratch, torch.no_grad():
        path, plain = f"{scratch}/model.onnx", Plain(Pooled(asked["folder"], asked["first"])).eval()
        torch.onnx.export(
            plain,
            (torch.ones(2, 16, dtype=torch.int64),),
            path,
            input_names=["ids"],
            output_names=["vectors"],
            dynamic_axes={"ids": {0: "texts", 1: "tokens"}, "vectors": {0: "texts"}},
            dynamo=False,
        )
        sizes = {"num_heads": plain.heads, "hidden_size": plain.heads * plain.width}
        optimized = optimize_model(path, model_type="bert", opt_level=0, use_gpu=False, **sizes)
        print(optimized.get_fused_operator_statistics(), file=sys.stderr)
        optimized.save_model_to_file(path)
        options = ort.SessionOptions()
        options.intra_op_num_threads = asked["threads"]
        session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def one_by_one(size: int, texts: Sequence[str]) -> Any:
        return np.concatenate([session.run(None, {"ids": ids})[0] for ids in tokens.batches(texts, size)])

    return {f"batches of {size}": partial(one_by_one, size) for size in BATCHES}


PEERS = {"sentence-transformers": sentence_transformers, "OpenVINO": openvino, "ONNX Runtime": onnxruntime}


class Quickest:
    """A peer with the quickest of its settings for each length."""

    def __init__(self, settings: dict[str, Compute]) -> None:
        self.settings, self.chosen = settings, dict[str, str]()

    def seconds(self, length: str, texts: Sequence[str]) -> tuple[float, str]:
        if length not in self.chosen:
            times = {name: self.once(name, texts) for name in self.settings}
            self.chosen[length] = min(times, key=times.__getitem__)
        return self.once(self.chosen[length], texts), self.chosen[length]

    def once(self, name: str, texts: Sequence[str]) -> float:
        began = time.perf_counter()
        self.settings[name](texts)
        return time.perf_counter() - began


def main() -> None:
    kind, asked = sys.argv[1], json.loads(sys.argv[2])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a library's output is not an answer

    def answer(what: dict[str, Any]) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        torch.set_num_threads(asked["threads"])
        tokens = Tokens(asked["folder"])
        peer = Quickest(PEERS[kind](asked, tokens))
    except ImportError as error:
        return answer({"error": f"not installed: {error.name or error}"})
    except Exception as error:
        return answer({"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"})
    answer({"ready": kind})
    for line in sys.stdin:
        told = json.loads(line)
        tokens.of(told["texts"])
        if told["check"]:
            name = next(iter(peer.settings))
            answer({"vectors": np.asarray(peer.settings[name](told["texts"])).tolist()})
            continue
        seconds, how = peer.seconds(told["length"], told["texts"])
        answer({"seconds": seconds, "how": how})


if __name__ == "__main__":
    main()
