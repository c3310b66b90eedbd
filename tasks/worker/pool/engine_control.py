"""Pause, resume and reload the engine of a running worker: `petiole pause`, `petiole resume`, `petiole reload`.

    ready ──pause──► paused ──resume──► ready
    ready or paused ──reload──► reloading ──► as before

A paused or reloading worker takes no messages, keeps those that it has, and renews their leases. One thread
carries out the commands, in order. A reload pauses the engine, overwrites the weights, records the new model for
all tasks in hand, and lets the engine go on: the tasks continue at their next tokens. The record comes before the
first token of the new weights, so no other worker continues a stream with a model that did not write its last
token.

A model that cannot replace the current one is refused before anything is changed. If reading the weights fails
half way, the worker ends as after a failure of its device, and other workers continue its tasks."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from celery.worker.control import control_command, inspect_command

from petiole.gpu_worker.exceptions import EngineClosed, ModelError
from petiole.tasks.wire.keys import own_of, renamed
from petiole.tasks.worker.generation.driver import Services
from petiole.tasks.worker.generation.intake import Intake
from petiole.tasks.worker.reports.facts import model_name

logger = logging.getLogger(__name__)

State = Literal["ready", "paused", "reloading"]


class EngineControl:
    """Carries out commands about the engine. `consumer` is Celery's; only its own thread may use it. `fail` is
    called with the error of a reload that has left the engine without weights."""

    def __init__(self, services: Services, intake: Intake, fail: Callable[[BaseException], None]) -> None:
        self._engine, self._mailbox, self._settings = services.engine, services.mailbox, services.settings
        self._intake, self._fail = intake, fail
        self._paused = self._reloading = self._closed = False
        self._given_up: list[str] = []  # queues that are consumed from again after a pause
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="petiole-steering", daemon=True)
        self.last_error = ""

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Carry out no further command. A reload that has begun is not waited for."""
        self._closed = True
        self._commands.put(None)

    @property
    def running(self) -> bool:
        """Whether its thread runs. Once closed: whether it is in the middle of a reload."""
        return self._thread.is_alive()

    @property
    def state(self) -> State:
        return "reloading" if self._reloading else "paused" if self._paused else "ready"

    @property
    def given_up(self) -> list[str]:
        """The queues from which the worker takes nothing while it is paused or reloads, but which it still
        serves."""
        return list(self._given_up)

    @property
    def stands_still(self) -> bool:
        return self._paused or self._reloading

    # ------------------------------------------------------------ commands, on the consumer's thread

    def pause(self, consumer: Any) -> None:
        """Take no more messages, and stop the engine after the steps that it has launched."""
        self._paused = True
        self._stop_consuming(consumer)
        self._commands.put(self._engine.pause)

    def resume(self, consumer: Any) -> None:
        self._paused = False
        self._commands.put(lambda: self._go_on(consumer))

    def reload(self, consumer: Any, model: str) -> None:
        """Replace the weights by those of `model`: a folder or a hub id, of the same shape."""
        self._reloading, self.last_error = True, ""
        self._commands.put(lambda: self._reload(consumer, model))

    def _stop_consuming(self, consumer: Any) -> None:
        for name in list(consumer.app.amqp.queues.consume_from):
            self._given_up.append(name)
            consumer.cancel_task_queue(name)

    def _take_own_name(self, consumer: Any) -> None:
        """After a reload: serve the queues of the new model alone in place of those of the old one."""
        if self._closed:
            return
        queues, counters = consumer.app.amqp.queues, consumer.pool.counters
        name = model_name(self._settings, self._engine.limits.model)
        changed = {one: renamed(one, name) for one in own_of(self._given_up) if renamed(one, name) != one}
        for new in changed.values():
            if new not in queues:
                queues.add(queues.new_missing(new))
        self._given_up = [changed.get(one, one) for one in self._given_up]
        counters.leave(changed.keys())
        counters.take(changed.values())

    def _consume_again(self, consumer: Any) -> None:
        if self.stands_still or self._closed:  # by a later command, or the worker stops
            return
        while self._given_up:
            consumer.add_task_queue(self._given_up.pop())

    # ------------------------------------------------------------ on the thread of its own

    def _run(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                command()
            except EngineClosed:
                return
            except Exception as error:
                self._fail(error)
                return

    def _go_on(self, consumer: Any) -> None:
        if not self.stands_still:
            self._engine.resume()
            self._mailbox.post(lambda: self._consume_again(consumer))

    def _reload(self, consumer: Any, model: str) -> None:
        engine, begun = self._engine, time.monotonic()
        try:
            load = engine.prepare_reload(model)
        except ModelError as error:
            self.last_error = " ".join(str(error).split())
            logger.error("%s is refused, and the current model goes on serving: %s", model, self.last_error)
        else:
            logger.warning("loading %s in place of %s", model, engine.limits.model)
            self._mailbox.post(lambda: self._stop_consuming(consumer))
            engine.pause()
            load()
            self._intake.record_model()
            self._mailbox.post(lambda: self._take_own_name(consumer))
            logger.warning("serving %s after %.1f s", model, time.monotonic() - begun)
        self._reloading = False
        self._go_on(consumer)


# ------------------------------------------------------------ control commands


@control_command()  # type: ignore[untyped-decorator]
def pause_engine(state: Any, **_: object) -> dict[str, str]:
    """Stop the engine; keep the tasks in hand, and take no more."""
    return _steer(state, EngineControl.pause)


@control_command()  # type: ignore[untyped-decorator]
def resume_engine(state: Any, **_: object) -> dict[str, str]:
    """Let a paused engine go on."""
    return _steer(state, EngineControl.resume)


@control_command(args=[("model", str)], signature="<model>")  # type: ignore[untyped-decorator]
def reload_engine(state: Any, model: object = None, **_: object) -> dict[str, str]:
    """Replace the weights by those of another checkpoint of the same shape."""
    if not isinstance(model, str) or not model:
        return {"error": f"model: must be a folder or a hub id, got {model!r}"}
    return _steer(state, EngineControl.reload, model)


@inspect_command()  # type: ignore[untyped-decorator]
def engine_state(state: Any, **_: object) -> dict[str, str]:
    """Whether the engine is ready, paused, reloading or draining, and its model."""
    serving = state.consumer.pool.serving
    limits, steering = serving.services.engine.limits, serving.steering
    return {
        "state": serving.state,
        "model": limits.model,
        "fingerprint": limits.fingerprint,
        "error": steering.last_error,
    }


def _steer(state: Any, command: Callable[..., None], *arguments: str) -> dict[str, str]:
    serving = state.consumer.pool.serving
    if (now := serving.state) in ("draining", "reloading"):
        return {"error": f"the worker is {now}"}
    command(serving.steering, state.consumer, *arguments)
    return {"ok": f"{command.__name__} begins"}
