"""The tasks: `generate` continues a prompt, `chat` answers a conversation; `embed`, `rerank`, `score` and
`classify` are for models of texts; the others ask a vision model.

Their bodies do not generate. The worker's pool parses a task's arguments with `options.parse` and submits the
request to the engine. When the result is ready, it runs Celery's own trace function, and the body returns that
result. So states, links, chords, retries and events are Celery's code, and many tasks share one model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from celery.local import PromiseProxy

from petiole import _lazy
from petiole.tasks.app.application import app

if TYPE_CHECKING:
    from celery.canvas import Signature

    from petiole.contract.requests.count import CountDict
    from petiole.tasks.submission import counting, signatures, typed
    from petiole.tasks.submission.counting import CountTask
    from petiole.tasks.submission.task import GenerationTask, SubmittedTask
else:
    counting = _lazy.module("petiole.tasks.submission.counting")
    signatures = _lazy.module("petiole.tasks.submission.signatures")
    typed = _lazy.module("petiole.tasks.submission.typed")

T = TypeVar("T", bound="SubmittedTask")


class _Lazily(PromiseProxy):  # type: ignore[misc]
    """A task that is made when it is first used, because making it reads the configuration. Making a signature
    does not use the task, so a module may have signatures at its top."""

    __slots__ = ()

    def signature(self, args: Any = None, kwargs: Any = None, *more: Any, **options: Any) -> Signature:
        name = object.__getattribute__(self, "task_name")
        return signatures.sign(name, args, kwargs, *more, **{"app": app, **options})

    subtask = signature

    def s(self, /, *args: Any, **options: Any) -> Signature:
        return self.signature(args, options)

    def si(self, /, *args: Any, **options: Any) -> Signature:
        return self.signature(args, options, immutable=True)


def _task(base: Callable[[], type[T]]) -> Callable[[Callable[..., Any]], T]:
    """`app.task`, but lazy (`_Lazily`), named after its function, and typed as the task that it makes.

    Celery gives each app the tasks of all other apps, and keeps the first of two tasks with one name. An
    application whose own module `tasks` has a `generate` takes no name from Petiole's app."""

    def decorator(body: Callable[..., Any]) -> T:
        name = f"tasks.{body.__name__}"

        def made() -> T:
            if not isinstance(app._tasks.get(name), base()):
                app._tasks.pop(name, None)
            return app._task_from_fun(body, name=name, base=base(), bind=True)  # type: ignore[no-any-return]

        lazily: Any = _Lazily(made, __doc__=body.__doc__)
        object.__setattr__(lazily, "task_name", name)
        app._pending.append(lazily)
        return lazily  # type: ignore[no-any-return]

    return decorator


@_task(lambda: typed.GenerateTask)
def generate(self: GenerationTask, /, *given: object, **options: Any) -> dict[str, Any]:
    """Continue `prompt`, text or token ids. The options are the fields of `GenerateRequest`.

    In a chain the text of the previous result is appended to `prompt`, which may be omitted; in the body of a
    chord the texts of all results are appended, a line for each.
    """
    return self.finished(given, options)


@_task(lambda: typed.ChatTask)
def chat(self: GenerationTask, /, *given: object, **options: Any) -> dict[str, Any]:
    """Answer `messages`. The options are the fields of `ChatRequest`.

    In a chain the text of the previous result is appended as a user message.
    """
    return self.finished(given, options)


@_task(lambda: typed.QueryTask)
def query(self: GenerationTask, /, *given: object, **options: Any) -> dict[str, Any]:
    """Answer `question`, about `image` or not. The options are the fields of `QueryRequest`.

    In a chain the text of the previous result is appended to `question`.
    """
    return self.finished(given, options)


@_task(lambda: typed.CaptionTask)
def caption(self: GenerationTask, /, *given: object, **options: Any) -> dict[str, Any]:
    """Describe `image`. The options are the fields of `CaptionRequest`."""
    return self.finished(given, options)


@_task(lambda: typed.PointTask)
def point(self: GenerationTask, /, *given: object, **options: Any) -> dict[str, Any]:
    """Say where in `image` each `object` is. The options are the fields of `PointRequest`."""
    return self.finished(given, options)


@_task(lambda: typed.DetectTask)
def detect(self: GenerationTask, /, *given: object, **options: Any) -> dict[str, Any]:
    """Put a box around each `object` in `image`. The options are the fields of `DetectRequest`."""
    return self.finished(given, options)


@_task(lambda: typed.EmbedTask)
def embed(self: GenerationTask, /, *given: object, **options: Any) -> dict[str, Any]:
    """Make a vector of each of `texts`. The options are the fields of `EmbedRequest`.

    In a chain the text of the previous result becomes a text, or each text of a group's results.
    """
    return self.finished(given, options)


@_task(lambda: typed.RerankTask)
def rerank(self: GenerationTask, /, *given: object, **options: Any) -> dict[str, Any]:
    """Rank `documents` by how well they match a `query`. The options are the fields of `RerankRequest`.

    In a chain the text of the previous result is appended to `query`.
    """
    return self.finished(given, options)


@_task(lambda: typed.ScoreTask)
def score(self: GenerationTask, /, *given: object, **options: Any) -> dict[str, Any]:
    """Say how well the texts of each of `pairs` match. The options are the fields of `ScoreRequest`."""
    return self.finished(given, options)


@_task(lambda: typed.ClassifyTask)
def classify(self: GenerationTask, /, *given: object, **options: Any) -> dict[str, Any]:
    """Give each of `texts` or `pairs` a score for each class. The options are the fields of `ClassifyRequest`.

    In a chain the text of the previous result becomes a text, or each text of a group's results.
    """
    return self.finished(given, options)


@_task(lambda: counting.CountTask)
def count(self: CountTask, /, *given: object, **options: Any) -> CountDict:
    """Count tokens, at once. The options are the fields of `CountRequest`."""
    return self.counted(given, options)
