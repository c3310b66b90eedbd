"""A tenant's server, which takes notices.

with Receiver() as receiver:
    receiver.answers.put(500)       # the status of one answer; otherwise 200
    receiver.got                    # each try: its headers and its body
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import openai


class Got(NamedTuple):
    path: str
    headers: dict[str, str]
    body: str

    def event(self, secret: str) -> Any:
        """As OpenAI's client reads it, once it has checked the signature."""
        return openai.OpenAI(api_key="none").webhooks.unwrap(self.body, self.headers, secret=secret)


class Receiver:
    def __init__(self) -> None:
        self.got: list[Got] = []
        self.answers: SimpleQueue[int] = SimpleQueue()
        self.open = threading.Event()
        self.open.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"])).decode()
                headers = {name.lower(): value for name, value in self.headers.items()}
                receiver.got.append(Got(self.path, headers, body))
                receiver.open.wait()
                try:
                    status = receiver.answers.get_nowait()
                except Empty:
                    status = 200
                self.send_response(status)
                self.send_header("location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/told?by=petiole"

    def ids(self) -> list[str]:
        """Of what each try was about."""
        return [one.headers["webhook-id"] for one in self.got]

    def __enter__(self) -> Receiver:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()
