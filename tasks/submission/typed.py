"""The tasks: what each takes, for type checkers.

A generic class could have these signatures as ParamSpecs, and type checkers would find the same mistakes. But
editors show an option's meaning from the field of a TypedDict, and behind a ParamSpec they find none. `python -m
docs.render` writes this module: change the template there.
"""
# These methods take fewer options than the base's:
# mypy: disable-error-code="override"

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
        def delay_on_commit(self, **options: Unpack[types.GenerateCall]) -> AsyncGeneration: ...
        async def adelay_on_commit(self, **options: Unpack[types.GenerateCall]) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialGenerateOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.GenerateOptions]) -> Signature: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.GenerateOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def stream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.GenerateCall],
        ) -> readers.Stream: ...
        def astream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.GenerateCall],
        ) -> AsyncGenerator[StreamDelta, None]: ...


class ChatTask(GenerationTask):
    """`chat`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.ChatCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.ChatCall]) -> AsyncGeneration: ...
        def delay_on_commit(self, **options: Unpack[types.ChatCall]) -> AsyncGeneration: ...
        async def adelay_on_commit(self, **options: Unpack[types.ChatCall]) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialChatOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.ChatOptions]) -> Signature: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.ChatOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def stream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.ChatCall],
        ) -> readers.Stream: ...
        def astream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.ChatCall],
        ) -> AsyncGenerator[StreamDelta, None]: ...


class QueryTask(GenerationTask):
    """`query`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.QueryCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.QueryCall]) -> AsyncGeneration: ...
        def delay_on_commit(self, **options: Unpack[types.QueryCall]) -> AsyncGeneration: ...
        async def adelay_on_commit(self, **options: Unpack[types.QueryCall]) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialQueryOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.QueryOptions]) -> Signature: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.QueryOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def stream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.QueryCall],
        ) -> readers.Stream: ...
        def astream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.QueryCall],
        ) -> AsyncGenerator[StreamDelta, None]: ...


class CaptionTask(GenerationTask):
    """`caption`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.CaptionCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.CaptionCall]) -> AsyncGeneration: ...
        def delay_on_commit(self, **options: Unpack[types.CaptionCall]) -> AsyncGeneration: ...
        async def adelay_on_commit(self, **options: Unpack[types.CaptionCall]) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialCaptionOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.CaptionOptions]) -> Signature: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.CaptionOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def stream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.CaptionCall],
        ) -> readers.Stream: ...
        def astream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.CaptionCall],
        ) -> AsyncGenerator[StreamDelta, None]: ...


class PointTask(GenerationTask):
    """`point`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.PointCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.PointCall]) -> AsyncGeneration: ...
        def delay_on_commit(self, **options: Unpack[types.PointCall]) -> AsyncGeneration: ...
        async def adelay_on_commit(self, **options: Unpack[types.PointCall]) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialPointOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.PointOptions]) -> Signature: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.PointOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def stream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.PointCall],
        ) -> readers.Stream: ...
        def astream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.PointCall],
        ) -> AsyncGenerator[StreamDelta, None]: ...


class DetectTask(GenerationTask):
    """`detect`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.DetectCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.DetectCall]) -> AsyncGeneration: ...
        def delay_on_commit(self, **options: Unpack[types.DetectCall]) -> AsyncGeneration: ...
        async def adelay_on_commit(self, **options: Unpack[types.DetectCall]) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialDetectOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.DetectOptions]) -> Signature: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.DetectOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def stream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.DetectCall],
        ) -> readers.Stream: ...
        def astream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.DetectCall],
        ) -> AsyncGenerator[StreamDelta, None]: ...


class EmbedTask(EmbeddingTask):
    """`embed`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.EmbedCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.EmbedCall]) -> AsyncGeneration: ...
        def delay_on_commit(self, **options: Unpack[types.EmbedCall]) -> AsyncGeneration: ...
        async def adelay_on_commit(self, **options: Unpack[types.EmbedCall]) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialEmbedOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.EmbedOptions]) -> Signature: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.EmbedOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def stream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.EmbedCall],
        ) -> readers.Stream: ...
        def astream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.EmbedCall],
        ) -> AsyncGenerator[StreamDelta, None]: ...


class RerankTask(GenerationTask):
    """`rerank`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.RerankCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.RerankCall]) -> AsyncGeneration: ...
        def delay_on_commit(self, **options: Unpack[types.RerankCall]) -> AsyncGeneration: ...
        async def adelay_on_commit(self, **options: Unpack[types.RerankCall]) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialRerankOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.RerankOptions]) -> Signature: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.RerankOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def stream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.RerankCall],
        ) -> readers.Stream: ...
        def astream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.RerankCall],
        ) -> AsyncGenerator[StreamDelta, None]: ...


class ScoreTask(GenerationTask):
    """`score`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.ScoreCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.ScoreCall]) -> AsyncGeneration: ...
        def delay_on_commit(self, **options: Unpack[types.ScoreCall]) -> AsyncGeneration: ...
        async def adelay_on_commit(self, **options: Unpack[types.ScoreCall]) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialScoreOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.ScoreOptions]) -> Signature: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.ScoreOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def stream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.ScoreCall],
        ) -> readers.Stream: ...
        def astream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.ScoreCall],
        ) -> AsyncGenerator[StreamDelta, None]: ...


class ClassifyTask(GenerationTask):
    """`classify`."""

    if TYPE_CHECKING:

        def delay(self, **options: Unpack[types.ClassifyCall]) -> AsyncGeneration: ...
        async def adelay(self, **options: Unpack[types.ClassifyCall]) -> AsyncGeneration: ...
        def delay_on_commit(self, **options: Unpack[types.ClassifyCall]) -> AsyncGeneration: ...
        async def adelay_on_commit(self, **options: Unpack[types.ClassifyCall]) -> AsyncGeneration: ...
        def s(self, **options: Unpack[types.PartialClassifyOptions]) -> Signature: ...
        def si(self, **options: Unpack[types.ClassifyOptions]) -> Signature: ...
        def apply_async(
            self,
            args: Sequence[object] | None = None,
            kwargs: types.ClassifyOptions = ...,
            *more: Any,
            **options: Any,
        ) -> AsyncGeneration: ...
        def stream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.ClassifyCall],
        ) -> readers.Stream: ...
        def astream(
            self,
            *,
            timeout_s: float | None = None,
            heartbeat_s: float | None = None,
            prepared: bool = False,
            parsed: bool = False,
            **options: Unpack[types.ClassifyCall],
        ) -> AsyncGenerator[StreamDelta, None]: ...
