"""Model hubs on this machine; one never sends the last bytes of the weights."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from petiole.gpu_worker import models

TINY = Path(models.__file__).parent / "petiole_tiny"
COMMIT = "a" * 40


class Hub:
    """Serves these files as somebody/model, for as long as this is open. `url` is for HF_ENDPOINT; `sent` has the
    names of what was downloaded. held: the end of the names of files whose last bytes are never sent."""

    def __init__(self, files: Mapping[str, bytes], held: str = "\0") -> None:
        over = self._over = threading.Event()
        sent: list[str] = []
        self.sent = sent

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self.answer(*found(self.path, files))

            def do_GET(self) -> None:
                headers, content = found(self.path, files)
                held_back = content[-1000:] if self.path.endswith(held) else b""
                sent.extend([self.path.partition("/resolve/")[2].partition("/")[2]] * ("/resolve/" in self.path))
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

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._over.set()
        self._server.shutdown()
        self._server.server_close()


class SlowHub(Hub):
    """Serves petiole-tiny."""

    def __init__(self) -> None:
        kept = (file for file in TINY.iterdir() if file.suffix in {".json", ".safetensors"})
        super().__init__({file.name: file.read_bytes() for file in kept}, ".safetensors")


def found(path: str, files: Mapping[str, bytes]) -> tuple[dict[str, str], bytes]:
    """What the hub answers: headers and body."""
    path = path.partition("?")[0]
    if "/resolve/" in path:
        name = path.partition("/resolve/")[2].partition("/")[2]
        return {"ETag": f'"{name.replace("/", "-")}"', "X-Repo-Commit": COMMIT}, files[name]
    if "/tree/" in path:
        listed: Any = [
            {"type": "file", "oid": name, "size": len(content), "path": name} for name, content in files.items()
        ]
    else:
        listed = {"id": "somebody/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
    return {"Content-Type": "application/json"}, json.dumps(listed).encode()
