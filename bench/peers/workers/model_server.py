"""A model behind HTTP, as people run it beside their Celery workers: one prompt at a time, while the others wait.

    python -m bench.peers.workers.model_server --model FOLDER [--dtype bfloat16] [--threads N]

It prints its port when it serves. `POST /v1/completions` takes {"prompt": [token ids], "max_tokens": n} and
answers {"token_ids": [...]}.
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Generate = Callable[[list[int], int], list[int]]


def transformers(folder: str, dtype: str, threads: int) -> Generate:
    import torch

    from bench.peers.transformers_peer import Transformers

    if threads:
        torch.set_num_threads(threads)
    model = Transformers(folder, dtype)
    return lambda prompt, max_tokens: model.tokens([prompt], max_tokens)[0]


def handler(generate: Generate) -> type[BaseHTTPRequestHandler]:
    one_at_a_time = threading.Lock()

    class Completions(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with one_at_a_time:
                tokens = generate(asked["prompt"], asked["max_tokens"])
            answer = json.dumps({"token_ids": tokens}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:
            return

    return Completions


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args(argv)
    generate = transformers(options.model, options.dtype, options.threads)
    server = ThreadingHTTPServer(("127.0.0.1", options.port), handler(generate))
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
