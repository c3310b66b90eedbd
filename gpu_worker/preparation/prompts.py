"""Turns the subject of a request (a prompt, messages or a skill call) into the tokens of a prompt with its images.

The chat template of most models places images: it writes a *placeholder* token for each, in whose place the
positions of the image stand. Such a model answers a skill call as a conversation. A model with a processor answers
a conversation by a skill, and its processor decides which ones it can answer. A text model refuses images wherever
they stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from petiole.contract.requests.images import AS_IT_IS, IMAGE_PARTS, VIDEO_PARTS, View
from petiole.contract.settings.engine import EngineConfig
from petiole.gpu_worker.constraints import PositionalConstraint, SkillConstraint
from petiole.gpu_worker.exceptions import InvalidRequest, require
from petiole.gpu_worker.preparation import truncation
from petiole.gpu_worker.preparation.images import request_image
from petiole.gpu_worker.preparation.infill import infill
from petiole.gpu_worker.preparation.skills import (
    ANSWERS,
    FoundInText,
    constraint_of,
    conversation_of,
    without_thought,
)
from petiole.gpu_worker.preparation.tokens import InputTokens, check_truncate, prompt_tokens
from petiole.gpu_worker.preparation.videos import VideoInputs, VideoReader
from petiole.gpu_worker.request import Request
from petiole.gpu_worker.request.prepared_images import IMAGE, ImagePlace, PreparedImage, RequestImage
from petiole.gpu_worker.request.protocols import PositionalSkill, SkillState
from petiole.gpu_worker.request.skills import Pictures, Processor, SkillCall, SkillPrompt
from petiole.gpu_worker.runtime.interface import ModelLimits
from petiole.gpu_worker.text import Tokenizer
from petiole.gpu_worker.text.tokenizer import cut

Reading = SkillState | PositionalSkill

_SUBJECTS = ("prompt", "messages", "skill")
_TEXTS_OF_SKILLS = ("question", "object")
"""Options that the caller can shorten if the prompt is too long."""
_ONLY_FOR_CHAT = ("tools", "chat_template_kwargs", "continue_final_message")


@dataclass(frozen=True, slots=True)
class PromptInputs:
    """The subject of a request.

    `request`: the request with the sampling and the constraint of its skill. `field`: the field that errors about
    the prompt name. `reading`: the state that reads a skill's answer. `answer`: what an answer is called that is
    the text. `has_text`: whether the output is text."""

    request: Request
    prompt: InputTokens
    field: str
    reading: Reading | None = None
    has_text: bool = True
    answer: str | None = None


NO_SKILLS = "this model has no skills"


@dataclass(frozen=True, slots=True)
class PromptReader:
    """Reads requests for one model. Each method raises InvalidRequest."""

    config: EngineConfig
    limits: ModelLimits
    tokenizer: Tokenizer | None
    eos_token_ids: Collection[int]

    def of(self, request: Request) -> PromptInputs:
        given = [name for name in _SUBJECTS if getattr(request, name) is not None]
        one = f"exactly one of {', '.join(_SUBJECTS)} must be given"
        require(len(given) == 1, "prompt", one, f"{len(given)} of them")
        for field in _ONLY_FOR_CHAT if request.messages is None else ():
            require(not getattr(request, field), field, "needs messages", f"a {given[0]}")
        check_truncate(request.truncate, request.truncate_to)
        if request.suffix is not None:
            return self._filled_in(request, request.suffix)
        plain = self.limits.processor is None or request.prompt is not None
        require(plain or request.truncate is None, "truncate", "is not for models with images", request.truncate)
        if request.skill is not None:
            field = next((name for name in _TEXTS_OF_SKILLS if name in request.skill.options), "skill")
            if self._placeholder is not None:
                return self._answered(request, request.skill, field)
            require(self.limits.processor is not None, "skill", NO_SKILLS, request.skill.name)
            return self._asked(request, request.skill, self._seen(request, "image").images, field)
        if request.messages is not None:
            return self._chat(request, request.messages)
        return self._prompt(request)

    # ------------------------------------------------------------ each kind

    def _prompt(self, request: Request) -> PromptInputs:
        cuts_text = request.truncate is None or not request.images
        require(cuts_text, "truncate", "cannot be combined with images in a prompt", request.truncate)
        if not isinstance(request.prompt, str):
            limits, images = self.limits, self._seen(request).images
            prompt = self._with_places(request.prompt, len(images), "prompt")
            given = prompt_tokens(prompt, limits.vocab_size, limits.values, images)
            if request.truncate is not None and not given.numbers:
                most = self._most_of(request)
                given = InputTokens(cut(given.ids, most, request.truncate), n_images=len(images))
            return PromptInputs(request, given, "prompt")
        require(request.prompt != "", "prompt", "must not be empty", "an empty string")
        tokenizer = self._tokenizer("prompt")
        if request.truncate is None:
            special = request.add_special_tokens
            text = self._written(tokenizer, request.prompt, ()) if request.images else request.prompt
            tokens = tokenizer.encode(text, add_special_tokens=special, max_tokens=self._most_tokens)
        else:
            most = self._most_of(request)
            tokens = tokenizer.encode_cut(request.prompt, field="prompt", max_tokens=most, where=request.truncate)
        return PromptInputs(request, self._placed(tokens, self._seen(request).images, "prompt"), "prompt")

    def _filled_in(self, request: Request, suffix: str) -> PromptInputs:
        """A prompt whose output ends before the suffix: at any mark, and at what models write then."""
        prompt, cut = request.prompt, request.truncate
        if not isinstance(prompt, str):
            raise InvalidRequest("suffix", "needs a prompt that is text", "another subject")
        require(cut is None, "truncate", "cannot be combined with suffix", cut)
        require(not request.images, "suffix", "cannot be combined with images", f"{len(request.images)} images")
        special, tokenizer = request.add_special_tokens, self._tokenizer("prompt")
        found = infill(prompt, suffix, tokenizer, add_special_tokens=special, max_tokens=self._most_tokens)
        sampling = request.sampling
        if not sampling.ignore_eos:
            sampling = replace(sampling, stop_token_ids=[*sampling.stop_token_ids, *found.ends])
        return PromptInputs(replace(request, sampling=sampling), InputTokens(found.ids), "prompt")

    def _chat(self, request: Request, messages: Sequence[Mapping[str, Any]]) -> PromptInputs:
        processor, what = self.limits.processor, "text or an image: this model takes no videos"
        refused: Collection[str] = VIDEO_PARTS if self.limits.videos is None else ()
        if processor is None and self._placeholder is None:
            refused, what = (*IMAGE_PARTS, *VIDEO_PARTS), "text: this model takes no images"
        for part in _parts(messages):
            require(part.kind not in refused, part.field, f"must be {what}", part.kind)
        if processor is None:
            return PromptInputs(request, self._told(request, messages, "messages"), "messages")
        for field in _ONLY_FOR_CHAT:
            require(
                not getattr(request, field),
                field,
                "must not be given: this model's conversations have none",
                "some",
            )
        call, seen = processor.conversation(messages), self._seen(request, "messages", messages)
        return self._asked(request, call, seen.images, "messages")

    def _told(
        self, request: Request, messages: Sequence[Mapping[str, Any]], field: str, *, thinks: bool = True
    ) -> InputTokens:
        """The tokens of a conversation, and the images where the chat template places them. thinks: whether a
        thought that the template begins stays open."""
        tokenizer, seen = self._tokenizer("messages"), self._seen(request, field, messages)
        images = seen.images

        def rewrite(text: str) -> str:
            text = self._written(tokenizer, text, seen.videos) if images else text
            return text if thinks else without_thought(text)

        render = partial(
            tokenizer.apply_chat_template,
            tools=request.tools,
            variables=request.chat_template_kwargs,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            content_is_text=self.config.user_control_tokens == "text",
            rewrite=rewrite,
        )
        if request.truncate is None:
            return self._placed(render(messages, max_tokens=self._most_tokens), images, field)

        def tokens_of(texts: Sequence[Mapping[str, Any]]) -> list[int]:
            return self._placed(render(texts), images, field).ids

        most = self._most_of(request)
        cut = truncation.shortened(messages, tokenizer, tokens_of, most, request.truncate)
        least = "must leave room for the chat template, which is not cut, and for some of the texts"
        require(len(cut) <= (request.truncate_to or len(cut)), "truncate_to", least, request.truncate_to)
        return InputTokens(cut, images=_where(cut, images), n_images=len(images))

    def _answered(self, request: Request, call: SkillCall, field: str) -> PromptInputs:
        """A skill call as a conversation."""
        boxes = None if self.limits.images is None else self.limits.images.boxes
        messages = conversation_of(call, len(request.images), finds=boxes is not None)
        told = replace(request, skill=None, messages=messages, chat_template_kwargs={"enable_thinking": False})
        try:
            prompt = self._told(told, messages, "image" if request.images else field, thinks=False)
        except InvalidRequest as error:  # the caller has given no messages
            name = field if error.field.startswith("messages") else error.field
            raise InvalidRequest(name, error.limit, error.value) from None
        if call.name in ANSWERS:
            return PromptInputs(self._within(request), prompt, field, answer=ANSWERS[call.name])
        (image,) = prompt.images.values()
        whole = image.size if boxes == 0 and image.size is not None else (boxes or 1,) * 2
        self._check_unconstrained(request)
        request = replace(
            request,
            constraint=constraint_of(call, whole),
            sampling=replace(request.sampling, max_tokens="rest"),
        )
        reading = FoundInText(call.name, whole, self._tokenizer(field))
        return PromptInputs(request, prompt, field, reading, has_text=False)

    def _asked(self, request: Request, call: SkillCall, images: list[RequestImage], field: str) -> PromptInputs:
        asked = cast(Processor, self.limits.processor).ask(
            call, len(images), _Codec(self._tokenizer(field), self._most_tokens, self.config.user_control_tokens)
        )
        tokens = prompt_tokens(asked.prompt, self.limits.vocab_size, self.limits.values, images)
        steered = self._steered(request, asked)
        return PromptInputs(steered, tokens, field, asked.state, asked.has_text, asked.answer)

    def _steered(self, request: Request, asked: SkillPrompt) -> Request:
        """The request with a skill's bans and constraint, and with `max_tokens` within the context."""
        sampling = request.sampling
        if asked.banned_token_ids:
            bans = [*sampling.banned_token_ids, *asked.banned_token_ids]
            sampling = replace(sampling, banned_token_ids=bans)
        request = self._within(replace(request, sampling=sampling))
        if asked.steering == "none":
            return request
        self._check_unconstrained(request)
        rest = self.eos_token_ids, self.limits.vocab_size
        if asked.steering == "index":
            positional = cast(PositionalSkill, asked.state).fork()
            return replace(request, constraint=PositionalConstraint(positional, *rest))
        return replace(request, constraint=SkillConstraint(cast(SkillState, asked.state).fork(), *rest))

    @staticmethod
    def _check_unconstrained(request: Request) -> None:
        limit = "must be none: the skill has a constraint of its own"
        require(request.constraint is None, "constraint", limit, request.constraint)

    def _within(self, request: Request) -> Request:
        """The request with `max_tokens` within the context: a default may be larger."""
        sampling, longest = request.sampling, self.limits.max_model_len
        if isinstance(sampling.max_tokens, int) and sampling.max_tokens > longest:
            sampling = replace(sampling, max_tokens=longest)
        return replace(request, sampling=sampling)

    # ------------------------------------------------------------ parts

    @property
    def _placeholder(self) -> int | None:
        return None if self.limits.images is None else self.limits.images.placeholder

    def _written(self, tokenizer: Tokenizer, text: str, videos: Sequence[VideoInputs]) -> str:
        """A text in which images and videos stand as the model has learnt it."""

        def text_of(parts: Sequence[int | str]) -> str:
            return "".join(one if isinstance(one, str) else tokenizer.text_of(one) for one in parts)

        written = None if self.limits.images is None else self.limits.images.written
        if written is not None:
            text = text.replace(tokenizer.text_of(written.mark), text_of(written.parts))
        if self.limits.videos is None or not videos:
            return text
        first, *rest = text.split(tokenizer.text_of(self.limits.videos.mark))
        limit = f"must have as many video tokens as videos, {len(videos)}"
        require(len(rest) == len(videos), "messages", limit, len(rest))
        return first + "".join(text_of(one.written) + behind for one, behind in zip(videos, rest, strict=True))

    def _placed(self, tokens: list[int], images: list[RequestImage], field: str) -> InputTokens:
        """Tokens of text, with the images in the places of placeholders."""
        placed = self._with_places(tokens, len(images), field)
        if placed is tokens:
            return InputTokens(tokens, n_images=len(images))
        return prompt_tokens(placed, self.limits.vocab_size, self.limits.values, images)

    def _with_places(self, tokens: Any, n: int, field: str) -> Any:
        """Token ids with an `ImagePlace` for each placeholder, of which there must be one for each image."""
        if self._placeholder is None or not isinstance(tokens, Sequence):
            return tokens
        if n and any(isinstance(one, ImagePlace) for one in tokens):
            return tokens
        marks = {self._placeholder} | ({self.limits.videos.placeholder} if self.limits.videos else set())
        found, places = sum(1 for one in tokens if one in marks), iter(range(n))
        require(found == n, field, f"must have as many image tokens as images, {n}", found)
        return [ImagePlace(next(places)) if one in marks else one for one in tokens] if n else tokens

    def _seen(
        self, request: Request, field: str | None = None, messages: Sequence[Mapping[str, Any]] | None = None
    ) -> _Seen:
        """The request's images and videos. `field`: the field that errors name, if they do not name an image by
        its index or its part of the messages."""
        n, seen = len(request.images), _Seen()
        require(self.limits.images is not None or n == 0, "images", "this model takes none", n)
        views = request.image_views or (AS_IT_IS,) * n
        require(len(views) == n, "image_views", f"must be as many as images, {n}", len(views))
        parts = [_Part(field or f"images[{k}]", "image") for k in range(n)]
        if messages is not None:
            parts = [*_parts(messages)]
            of = sum(part.n_files for part in parts)
            require(n == of, "images", f"must be as many as the messages' parts of type image, {of}", n)
        given = list(zip(request.images, views, strict=True))
        for part in parts:
            where = part.field if field in (None, "messages") else field
            own, given = given[: part.n_files], given[part.n_files :]
            if part.kind in VIDEO_PARTS:
                seen.add(self._video(own, where, part))
            else:
                seen.images += [self._examined(image, where, self.limits.pictures, view) for image, view in own]
        return seen

    def _examined(self, image: object, field: str, pictures: Pictures | None, view: View) -> RequestImage:
        if isinstance(image, PreparedImage):
            return RequestImage.of(image)
        if pictures is None:
            raise InvalidRequest(field, "this model takes no images", "an image")
        return request_image(_bytes_of(image, field), field, pictures, self.config, view)

    def _video(self, given: Sequence[tuple[object, View]], field: str, part: _Part) -> VideoInputs:
        if self.limits.videos is None or self.limits.images is None:
            raise InvalidRequest(field, "this model takes no videos", part.kind)
        reader = VideoReader(self.limits.videos, self.limits.images, self.config)
        files, view = [_bytes_of(file, field) for file, _ in given], given[0][1]
        return (
            reader.of_file(files[0], field, view) if part.frames is None else reader.of_frames(files, field, view)
        )

    @property
    def _most_tokens(self) -> int:
        return self.limits.max_model_len - 1

    def _most_of(self, request: Request) -> int:
        return truncation.most_of(request.sampling, self.limits.max_model_len, request.truncate_to)

    def _tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise no_tokenizer(field)
        return self.tokenizer


@dataclass(frozen=True, slots=True)
class _Codec:
    """Implements `TextCodec`."""

    tokenizer: Tokenizer
    max_tokens: int
    user_control_tokens: str

    def encode(self, text: str, *, field: str) -> list[int]:
        if self.user_control_tokens == "text":
            return self.tokenizer.encode_as_text(text, field=field, max_tokens=self.max_tokens)
        return self.tokenizer.encode(text, field=field, add_special_tokens=False, max_tokens=self.max_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids)


def no_tokenizer(field: str) -> InvalidRequest:
    return InvalidRequest(field, "text needs a tokenizer, and this engine has none", "text")


def names_a_video(messages: object) -> bool:
    """Whether messages, which are not checked yet, have one."""
    with suppress(InvalidRequest):
        return any(part.kind in VIDEO_PARTS for part in _parts(messages))
    return False


def _where(ids: list[int], images: Sequence[RequestImage]) -> dict[int, RequestImage]:
    """The images of tokens that have the positions of images, by the position where each begins."""
    found, at = dict[int, RequestImage](), 0
    for image in images:
        at = ids.index(IMAGE, at)
        found[at] = image
        at += image.n_positions
    return found


def _bytes_of(file: object, field: str) -> bytes:
    if not isinstance(file, bytes | bytearray | memoryview):
        raise InvalidRequest(field, "must be the bytes of a file, or crops", type(file).__name__)
    return bytes(file)


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of messages with images. frames: of a video that is a list."""

    field: str
    kind: str
    frames: int | None = None

    @property
    def n_files(self) -> int:
        """Its number of the request's images."""
        return 1 if self.frames is None else self.frames


@dataclass(slots=True)
class _Seen:
    """images: of pictures and videos, in order."""

    images: list[RequestImage] = dataclasses.field(default_factory=list)
    videos: list[VideoInputs] = dataclasses.field(default_factory=list)

    def add(self, video: VideoInputs) -> None:
        self.images += video.images
        self.videos.append(video)


def _parts(messages: object) -> Iterator[_Part]:
    """The parts of messages that have images. Other malformed parts are refused later."""
    for k, message in enumerate(messages if isinstance(messages, Sequence) else ()):
        content = message.get("content") if isinstance(message, Mapping) else None
        for i, part in enumerate(content if isinstance(content, Sequence) else ()):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind in (*IMAGE_PARTS, *VIDEO_PARTS):
                where, frames = f"messages[{k}].content[{i}]", part.get("frames")
                if kind in VIDEO_PARTS and frames is not None and (type(frames) is not int or frames < 1):
                    raise InvalidRequest(f"{where}.frames", "must be a number of the request's images", frames)
                yield _Part(where, str(kind), frames if kind in VIDEO_PARTS else None)
