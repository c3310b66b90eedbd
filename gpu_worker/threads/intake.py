"""The way in: other threads than the engine's turn requests into sequences.

    put ──┬── preparation threads ──┬── accept: the sequence goes to the engine's inbox
          ├── video threads ────────┤
          └── adapter threads ──────┴── refuse: the request ends with its error

Adapters are read from a disk or downloaded. A request that may have to wait for its adapter waits on the adapter
threads, so it delays no request without an adapter, and no request whose adapter is at hand. Videos, whose files
may take minutes to read, are prepared and cut on threads of their own, too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from functools import partial

from petiole.gpu_worker.exceptions import EngineError, failed
from petiole.gpu_worker.preparation.embeddings import TextInputs
from petiole.gpu_worker.preparation.output import RequestOutput
from petiole.gpu_worker.preparation.preparation import Preparer
from petiole.gpu_worker.preparation.prompts import names_a_video
from petiole.gpu_worker.request.prepared_images import PreparedImage, RequestImage
from petiole.gpu_worker.runtime.device.tracing import NO_TRACE, Tracer
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence
from petiole.gpu_worker.threads.inbox import ThreadPool

PREPARATION_THREADS = 2
VIDEO_THREADS = 2
ADAPTER_THREADS = 2


class PreparationThreads:
    """The threads that prepare requests.

    For each request they call `accept(seq, output)`, `accept_texts(output, texts, arrival_s)` for a request of
    texts, or `refuse(output, error)`. `adapter_at_hand` says whether the runtime has an adapter already.
    """

    def __init__(
        self,
        preparer: Preparer,
        adapter_at_hand: Callable[[str], bool],
        accept: Callable[[ScheduledSequence, RequestOutput], None],
        accept_texts: Callable[[RequestOutput, TextInputs, float], None],
        refuse: Callable[[RequestOutput, BaseException], None],
        tracer: Tracer = NO_TRACE,
    ) -> None:
        self.preparer = preparer
        self._adapter_at_hand = adapter_at_hand
        self._accept, self._accept_texts = accept, accept_texts
        self._refuse = refuse
        self._tracer = tracer
        self._arrivals = itertools.count()
        self._preparation = ThreadPool(PREPARATION_THREADS, "prepare")
        self._videos = ThreadPool(VIDEO_THREADS, "video")
        self._reading = ThreadPool(ADAPTER_THREADS, "adapter")

    def put(self, output: RequestOutput) -> bool:
        """Queue a request. Of two requests with equal priority, the one that was put first has the better rank.
        False once the threads are closed."""
        arrival, arrival_s = next(self._arrivals), time.perf_counter()
        adapter: object = output.handle.request.adapter  # not checked yet
        at_hand = not isinstance(adapter, str) or self._adapter_at_hand(adapter)
        threads = self._preparation if at_hand else self._reading
        if names_a_video(output.handle.request.messages):
            threads = self._videos
        return threads.put(lambda: self._prepare(output, arrival, arrival_s))

    def cut(self, image: RequestImage, done: Callable[[PreparedImage | Exception], None]) -> None:
        """Cut an image into crops on a preparation thread, or a video thread, then call `done` there. If they have
        ended, the calling thread does both."""

        def work() -> None:
            try:
                assert image.cut is not None, "an image that came with its crops"
                with self._tracer.span("cut"):
                    outcome: PreparedImage | Exception = image.cut()
            except Exception as error:
                outcome = error
            except BaseException as error:
                outcome = EngineError(f"an image could not be cut into crops: {error!r}")
            done(outcome)

        if not (self._videos if image.video else self._preparation).put(work):
            work()

    def close(self) -> None:
        """Returns when every request that was put has been accepted or refused."""
        self._preparation.close()
        self._videos.close()
        self._reading.close()

    def _prepare(self, output: RequestOutput, arrival: int, arrival_s: float) -> None:
        request, adapter_key = output.handle.request, None
        accept: Callable[[], None]
        try:
            if request.texts is not None:
                texts = self.preparer.texts(request)
                prepared, accept = texts.prepared, partial(self._accept_texts, output, texts, arrival_s)
            else:
                seq = self.preparer.prepare(output, arrival, arrival_s)
                prepared, adapter_key = self.preparer.described(seq), seq.adapter_key
                accept = partial(self._accept, seq, output)
        except Exception as error:  # InvalidRequest, or any error of a chat template or tokenizer
            self._refuse(output, error)
        except BaseException as error:  # a panic: libraries in Rust raise a BaseException for it
            self._refuse(output, failed(request.request_id, error))
        else:
            output.handle._prepare(prepared, adapter_key)
            accept()
