"""The tasks: what each takes, for type checkers.

A generic class could have these signatures as ParamSpecs, and type checkers would find the same mistakes. But
editors show an option's meaning from the field of a TypedDict, and behind a ParamSpec they find none. `python -m
docs.render` writes this module: change the template there.
"""
# These methods take fewer options than the base's:
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from celery.canvas import Signature

from petiole.contract import types
from petiole.contract.results.task_result import StreamDelta
from petiole.tasks.streams import readers
from petiole.tasks.streams.readers import AsyncGeneration
from petiole.tasks.submission.embed_many import EmbeddingTask
from petiole.tasks.submission.task import GenerationTask


class GenerateTask(GenerationTask):
    """`generate`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.GenerateCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.GenerateCall]) -> AsyncGeneration: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.GenerateOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialGenerateOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.GenerateOptions]) -> Signature: ...
        def stream(self, **options: Unpack[types.GenerateStream]) -> readers.Stream: ...
        def astream(self, **options: Unpack[types.GenerateStream]) -> AsyncGenerator[StreamDelta, None]: ...

        delay_on_commit = delay
        adelay_on_commit = adelay


class ChatTask(GenerationTask):
    """`chat`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.ChatCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.ChatCall]) -> AsyncGeneration: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.ChatOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialChatOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.ChatOptions]) -> Signature: ...
        def stream(self, **options: Unpack[types.ChatStream]) -> readers.Stream: ...
        def astream(self, **options: Unpack[types.ChatStream]) -> AsyncGenerator[StreamDelta, None]: ...

        delay_on_commit = delay
        adelay_on_commit = adelay


class QueryTask(GenerationTask):
    """`query`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.QueryCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.QueryCall]) -> AsyncGeneration: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.QueryOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialQueryOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.QueryOptions]) -> Signature: ...
        def stream(self, **options: Unpack[types.QueryStream]) -> readers.Stream: ...
        def astream(self, **options: Unpack[types.QueryStream]) -> AsyncGenerator[StreamDelta, None]: ...

        delay_on_commit = delay
        adelay_on_commit = adelay


class CaptionTask(GenerationTask):
    """`caption`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.CaptionCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.CaptionCall]) -> AsyncGeneration: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.CaptionOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialCaptionOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.CaptionOptions]) -> Signature: ...
        def stream(self, **options: Unpack[types.CaptionStream]) -> readers.Stream: ...
        def astream(self, **options: Unpack[types.CaptionStream]) -> AsyncGenerator[StreamDelta, None]: ...

        delay_on_commit = delay
        adelay_on_commit = adelay


class PointTask(GenerationTask):
    """`point`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.PointCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.PointCall]) -> AsyncGeneration: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.PointOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialPointOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.PointOptions]) -> Signature: ...
        def stream(self, **options: Unpack[types.PointStream]) -> readers.Stream: ...
        def astream(self, **options: Unpack[types.PointStream]) -> AsyncGenerator[StreamDelta, None]: ...

        delay_on_commit = delay
        adelay_on_commit = adelay


class DetectTask(GenerationTask):
    """`detect`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.DetectCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.DetectCall]) -> AsyncGeneration: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.DetectOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialDetectOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.DetectOptions]) -> Signature: ...
        def stream(self, **options: Unpack[types.DetectStream]) -> readers.Stream: ...
        def astream(self, **options: Unpack[types.DetectStream]) -> AsyncGenerator[StreamDelta, None]: ...

        delay_on_commit = delay
        adelay_on_commit = adelay


class EmbedTask(EmbeddingTask):
    """`embed`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.EmbedCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.EmbedCall]) -> AsyncGeneration: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.EmbedOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialEmbedOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.EmbedOptions]) -> Signature: ...
        def stream(self, **options: Unpack[types.EmbedStream]) -> readers.Stream: ...
        def astream(self, **options: Unpack[types.EmbedStream]) -> AsyncGenerator[StreamDelta, None]: ...

        delay_on_commit = delay
        adelay_on_commit = adelay


class RerankTask(GenerationTask):
    """`rerank`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.RerankCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.RerankCall]) -> AsyncGeneration: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.RerankOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialRerankOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.RerankOptions]) -> Signature: ...
        def stream(self, **options: Unpack[types.RerankStream]) -> readers.Stream: ...
        def astream(self, **options: Unpack[types.RerankStream]) -> AsyncGenerator[StreamDelta, None]: ...

        delay_on_commit = delay
        adelay_on_commit = adelay


class ScoreTask(GenerationTask):
    """`score`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.ScoreCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.ScoreCall]) -> AsyncGeneration: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.ScoreOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialScoreOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.ScoreOptions]) -> Signature: ...
        def stream(self, **options: Unpack[types.ScoreStream]) -> readers.Stream: ...
        def astream(self, **options: Unpack[types.ScoreStream]) -> AsyncGenerator[StreamDelta, None]: ...

        delay_on_commit = delay
        adelay_on_commit = adelay


class ClassifyTask(GenerationTask):
    """`classify`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.ClassifyCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.ClassifyCall]) -> AsyncGeneration: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.ClassifyOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialClassifyOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.ClassifyOptions]) -> Signature: ...
        def stream(self, **options: Unpack[types.ClassifyStream]) -> readers.Stream: ...
        def astream(self, **options: Unpack[types.ClassifyStream]) -> AsyncGenerator[StreamDelta, None]: ...

        delay_on_commit = delay
        adelay_on_commit = adelay
