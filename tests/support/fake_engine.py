"""An engine that makes its tokens up: the interface and the manners of `gpu_worker.Engine`, no model.

Token i of a request is a function of (prompt, seed, i), so the same request gives the same tokens on every
worker and a continuation is right exactly if it is equal. Each token's text is a word. `PETIOLE_FAKE_STEP_MS`
is the time of one step, in which every running request gets one token.

A prompt may ask for trouble: "die:K" kills the process at token K, "hang:K" stops the loop at token K,
"fatal:K" breaks the engine at token K. "stall:K S" stops it for S seconds,
and "fork:K S" makes a child process that lives for S seconds.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import accumulate

from petiole.contract.results.outputs import Prepared
from petiole.contract.settings.engine import Batching, EngineConfig
from petiole.gpu_worker.exceptions import EngineError, HandedBack, InvalidRequest, ModelError
from petiole.gpu_worker.request import Delta, FinishReason, Request, Result, Timing, Usage
from petiole.gpu_worker.request.handle import Handle
from petiole.gpu_worker.runtime.interface import ModelLimits

MAX_MODEL_LEN = 4096


def token(request: Request, index: int) -> int:
    subject = request.prompt if request.prompt is not None else request.messages
    return zlib.crc32(f"{subject!r}|{request.sampling.seed}|{index}".encode()) % 50_000


def word(token_id: int) -> str:
    return f"w{token_id} "


def expected(prompt: str, seed: int | None, max_tokens: int) -> list[int]:
    """What an undisturbed run gives."""
    from petiole.gpu_worker.request import SamplingParams

    request = Request(prompt=prompt, sampling=SamplingParams(seed=seed))
    return [token(request, index) for index in range(max_tokens)]


@dataclass
class Row:
    handle: Handle
    arrived: float
    admitted_at: float = 0.0
    tokens: list[int] = field(default_factory=list)
    ending: FinishReason | None = None
    handing_back: bool = False


class FakeEngine:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config = config.decided(Batching(int(os.environ.get("PETIOLE_FAKE_PLACES", "64"))))
        self.step_s = float(os.environ.get("PETIOLE_FAKE_STEP_MS", "2")) / 1000
        self.limits = ModelLimits(
            model=config.model,
            fingerprint=f"fake:{config.model}",
            vocab_size=50_000,
            max_model_len=MAX_MODEL_LEN,
            n_pages=10_000,
            page_size=1,
            max_batch_size=config.max_num_seqs + 1,
        )
        self.on_fatal: Callable[[BaseException], None] | None = None
        self.failure: BaseException | None = None
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._rows: dict[Handle, Row] = {}
        self._changed = threading.Condition()
        self._paused = self._loading = False
        self._stopped = False
        self._beat = time.monotonic()
        self._asleep = True
        self._total = 0
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)

    def start(self) -> FakeEngine:
        self._thread.start()
        return self

    @property
    def healthy(self) -> bool:
        return self.failure is None

    def submit(
        self,
        request: Request,
        *,
        on_prepared: Callable[[Handle, Prepared], None] | None = None,
        on_delta: Callable[[Handle, Delta], None] | None = None,
        on_admitted: Callable[[Handle], None] | None = None,
        on_done: Callable[[Handle], None] | None = None,
    ) -> Handle:
        handle = Handle(
            request, self, on_prepared=on_prepared, on_delta=on_delta, on_admitted=on_admitted, on_done=on_done
        )
        if self._refused(request) is None:
            words, model = str(request.prompt).split(), self.limits
            handle._prepare(Prepared(model.model, model.fingerprint, len(words), " ".join(words[-2:])), None)
        with self._changed:
            row = Row(handle, time.monotonic(), tokens=list(request.resume_token_ids))
            self._rows[handle] = row
            self._waiting.append(row)
            self._changed.notify()
        return handle

    def cancel_request(self, handle: Handle, reason: FinishReason) -> None:
        with self._changed:
            if (row := self._rows.get(handle)) is not None:
                row.ending = row.ending or reason
                self._changed.notify()

    def hand_back_request(self, handle: Handle) -> None:
        with self._changed:
            if (row := self._rows.get(handle)) is not None:
                row.handing_back = True
                self._changed.notify()

    def stats(self) -> dict[str, float | int | str]:
        return {
            "running": len(self._running),
            "waiting": len(self._waiting),
            "slots": self.config.max_num_seqs,
            "model": self.config.model,
            "device": "none",
            "generated_tokens": self._total,
            "pages_total": 10_000,
            "pages_free": 10_000 - len(self._running),
        }

    def expert_tokens(self) -> list[list[int]]:
        return []

    def tokens_of(self, request: Request) -> list[int]:
        """A token for each word."""
        words = request.prompt.split() if isinstance(request.prompt, str) else str(request.messages).split()
        return [zlib.crc32(one.encode()) % 50_000 for one in words]

    def text_of(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(map(word, token_ids))

    def entries_of(self, token_ids: Sequence[int]) -> list[str]:
        return [*map(word, token_ids)]

    def text_lengths(self, request: Request, token_ids: Sequence[int]) -> list[int]:
        return [*accumulate(len(word(token)) for token in token_ids)]

    def facts(self) -> dict[str, object]:
        return {"max_model_len": self.limits.max_model_len, "vocab_size": self.limits.vocab_size, "chat": True}

    def heartbeat_age_s(self) -> float:
        return 0.0 if self._asleep and not self._loading else time.monotonic() - self._beat

    def pause(self) -> None:
        with self._changed:
            self._paused = True

    def resume(self) -> None:
        with self._changed:
            self._paused = False
            self._changed.notify()

    def prepare_reload(self, model: str) -> Callable[[], None]:
        """`refused` is refused; `download` never ends; `slow:S` takes S seconds, with signs of life, `stuck:S`
        without; others none. As by a real engine, a name that cannot be read is refused."""
        if model == "refused":
            raise ModelError("refused has another shape")
        try:
            model.encode()
            lasts_s = float(model.partition(":")[2] or 0)
        except ValueError as error:
            raise ModelError(f"{model} cannot be read: {error}") from error
        if model == "download":  # on a thread for which a normal exit of the process waits
            with ThreadPoolExecutor(1) as threads:
                threads.submit(threading.Event().wait).result()

        def load() -> None:
            self._beat, self._loading = time.monotonic(), True
            until = self._beat + lasts_s
            while (left := until - time.monotonic()) > 0:
                time.sleep(min(left, 0.05))
                if not model.startswith("stuck"):
                    self._beat = time.monotonic()
            self.limits = replace(self.limits, model=model, fingerprint=f"fake:{model}")
            self._loading = False

        return load

    def shutdown(self, drain: bool = True) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(5)

    # ------------------------------------------------------------ the loop

    def _run(self) -> None:
        next_step = time.monotonic()
        while True:
            with self._changed:
                while not self._stopped and (self._paused or not (self._waiting or self._running)):
                    self._asleep = True
                    self._changed.wait()
                    next_step = time.monotonic()
                self._asleep = False
                self._beat = time.monotonic()
                if self._stopped:
                    return
                while self._waiting and len(self._running) < self.config.max_num_seqs:
                    self._running.append(self._waiting.popleft())
                waiting = [row for row in self._waiting if row.ending or row.handing_back]
                rows = list(self._running)
            for row in waiting:
                self._leave(row)
            for row in rows:
                self._step(row)
            next_step = max(next_step + self.step_s, time.monotonic() - 0.1)
            while (left := next_step - time.monotonic()) > 0:
                time.sleep(left)

    def _step(self, row: Row) -> None:
        request = row.handle.request
        if not row.handle.admitted:
            if (error := self._refused(request)) is not None:
                return self._end(row, error)
            row.admitted_at = time.monotonic()
            row.handle._admit()
        if row.ending is not None or row.handing_back:
            return self._leave(row)
        asked = request.sampling.max_tokens
        limit = MAX_MODEL_LEN if asked == "rest" else min(asked, MAX_MODEL_LEN)
        if len(row.tokens) >= limit:
            return self._end(row, self._result(row, FinishReason.LENGTH, "max_tokens"))
        self._trouble(row)
        if request.deadline_s is not None and time.monotonic() - row.admitted_at >= request.deadline_s:
            row.ending = FinishReason.DEADLINE
            return self._leave(row)
        index = len(row.tokens)
        row.tokens.append(token(request, index))
        self._total += 1
        last = FinishReason.LENGTH if index + 1 >= limit else None
        row.handle._push(Delta(index, (row.tokens[-1],), word(row.tokens[-1]), last))
        if last is not None:
            self._end(row, self._result(row, last, "max_tokens"))

    def _refused(self, request: Request) -> InvalidRequest | None:
        length = len(request.prompt.split() if isinstance(request.prompt, str) else request.prompt or ())
        asked = request.sampling.max_tokens
        if length + (1 if asked == "rest" else asked) > MAX_MODEL_LEN:
            return InvalidRequest(
                "prompt", f"must have at most {MAX_MODEL_LEN} tokens together with max_tokens", length
            )
        return None

    def _trouble(self, row: Row) -> None:
        prompt = row.handle.request.prompt
        kind, _, at = prompt.partition(":") if isinstance(prompt, str) else ("", "", "")
        if kind in {"die", "hang", "fatal", "stall", "fork"} and len(row.tokens) == int(at.split()[0]):
            if kind == "stall":
                time.sleep(float(at.split()[1]))
                return
            if kind == "fork":
                if not os.fork():
                    time.sleep(float(at.split()[1]))
                    os._exit(0)
                return
            if kind == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "hang":
                time.sleep(3600)
            self._break(EngineError("the device is lost"))

    def _break(self, error: EngineError) -> None:
        self.failure = error
        for row in list(self._rows.values()):
            self._end(row, HandedBack("the engine failed"))
        if self.on_fatal is not None:
            self.on_fatal(error)
        with self._changed:
            self._stopped = True

    def _leave(self, row: Row) -> None:
        if row.handing_back:
            self._end(row, HandedBack("handed back"))
        else:
            assert row.ending is not None
            row.handle._push(Delta(len(row.tokens), (), "", row.ending))
            self._end(row, self._result(row, row.ending, None))

    def _end(self, row: Row, outcome: Result | BaseException) -> None:
        with self._changed:
            if self._rows.pop(row.handle, None) is None:
                return
            for queue in (self._running, self._waiting):
                if row in queue:
                    queue.remove(row)
        row.handle._end(outcome)

    def _result(self, row: Row, reason: FinishReason, stop_reason: str | None) -> Result:
        now = time.monotonic()
        return Result(
            request_id=row.handle.request.request_id,
            text="".join(map(word, row.tokens)),
            token_ids=tuple(row.tokens),
            finish_reason=reason,
            stop_reason=stop_reason,
            usage=Usage(len(str(row.handle.request.prompt).split()), 0, len(row.tokens)),
            timing=Timing(0.0, 0.0, None, (now - row.arrived) * 1000),
            model=self.limits.model,
            draft_tokens=self.config.speculative_tokens * len(row.tokens),
            accepted_draft_tokens=len(row.tokens) if self.config.speculative_tokens else 0,
        )
