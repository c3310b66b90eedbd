"""A model hub on this machine that never sends the last bytes of the weights."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any

from petiole.gpu_worker import models

TINY = Path(models.__file__).parent / "petiole_tiny"
COMMIT = "a" * 40


class SlowHub:
    """Serves petiole-tiny as somebody/model, for as long as this is open. `url` is for HF_ENDPOINT."""

    def __init__(self) -> None:
        over = self._over = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(*found(self.path))

            def do_GET(self) -> None:
                headers, content = found(self.path)
                held_back = content[-1000:] if self.path.endswith(".safetensors") else b""
                self.answer(headers, content)
                self.wfile.write(content.removesuffix(held_back))
                self.wfile.flush()
                if held_back:
                    over.wait()

            def answer(self, headers: dict[str, str], content: bytes) -> None:
                self.send_response(200)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Not a word."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> SlowHub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()


def found(path: str) -> tuple[dict[str, str], bytes]:
    """What the hub answers: headers and body."""
    names = [file.name for file in TINY.iterdir() if file.suffix in {".json", ".safetensors"}]
    path = path.partition("?")[0]
    if "/resolve/" in path:
        name = path.rpartition("/")[2]
        return {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT}, (TINY / name).read_bytes()
    if "/tree/" in path:
        sizes = {name: (TINY / name).stat().st_size for name in names}
        listed: Any = [{"type": "file", "oid": name, "size": size, "path": name} for name, size in sizes.items()]
    else:
        listed = {"id": "somebody/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
    return {"Content-Type": "application/json"}, json.dumps(listed).encode()
