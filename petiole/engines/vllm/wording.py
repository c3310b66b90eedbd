"""A sequence as a message to vLLM, in vLLM's words. What vLLM lacks is refused by name.

Our rules decide where an output ends (`StopRules`), so vLLM is told only what it must know to generate no further.
A resumed sequence is a longer prompt."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from petiole.contract.requests.images import AS_IT_IS, View
from petiole.gpu_worker.constraints import BannedState
from petiole.gpu_worker.constraints.grammar import GrammarState
from petiole.gpu_worker.constraints.schema.grammar_writer import HEAD, WHITESPACE
from petiole.gpu_worker.exceptions import require
from petiole.gpu_worker.preparation.images import content_hash_of
from petiole.gpu_worker.request import TokenLogprobs
from petiole.gpu_worker.request.prepared_images import IMAGE, ImageLayout, PreparedImage
from petiole.gpu_worker.request.protocols import ConstraintState
from petiole.gpu_worker.runtime.interface import ModelLimits
from petiole.gpu_worker.scheduling.scheduled_sequence import ScheduledSequence

if TYPE_CHECKING:
    from PIL import Image

MOST_LOGPROBS = 128
_GREEDY = 1e-6
_SEEDS = 2**63
_PART = re.compile(r'"(?:\\.|[^"\\])*"|/(?:\\.|[^/\\])+/|@\w+')
"""A part of a grammar: a string, a pattern, or the name of another grammar."""
_TERMINAL = re.compile(r"^(T\d+): (.*)$", re.MULTILINE)
_BLANK_BEFORE, _BLANK_BEHIND = ('"}"', '"]"', '","', '":"'), ('"{"', '"["', '","', '":"')
_LARK = "%llguidance {}\n"
"""By this line vLLM knows the notation."""


class Files:
    """Pictures as files: vLLM makes the pixels, and the tokens in the place of the one that is here."""

    def layout(self, width: int, height: int, field: str, most: int, view: View = AS_IT_IS) -> ImageLayout:
        view.check_of_one_size(field)
        return ImageLayout(1)

    def prepared(self, picture: Image.Image, content_hash: int, layout: ImageLayout) -> PreparedImage:
        raise AssertionError("vLLM makes the pixels")


def checked(seq: ScheduledSequence) -> None:
    """Refuse what vLLM lacks. Raises InvalidRequest."""
    request, constraint = seq.request, grammar_of(seq.constraint)
    files = all(isinstance(image, bytes | bytearray | memoryview) for image in request.images)
    require(files, "images", "must be files, for vLLM", "pixels")
    heat = request.sampling.temperature
    require(heat <= 2, "temperature", "must be at most 2, for vLLM", heat)
    if constraint is None:
        return
    kind = getattr(request.constraint, "kind", "skill")
    plain = isinstance(constraint, GrammarState)
    require(plain, "constraint", "must be a grammar, without a budget for thoughts, for vLLM", kind)


def grammar_of(constraint: ConstraintState | None) -> ConstraintState | None:
    """A constraint without the words that are banned beside it."""
    return constraint.inner if isinstance(constraint, BannedState) else constraint


def submission(seq: ScheduledSequence, limits: ModelLimits) -> dict[str, Any]:
    """What vLLM is asked. Where a picture stands, its prompt has one token."""
    request, sampling, rules, done = seq.request, seq.request.sampling, seq.rules, len(seq.generated)
    bias: dict[int, float] = {token: float("-inf") for token in sampling.banned_token_ids}
    greedy = sampling.temperature < _GREEDY
    options: dict[str, Any] = {
        "max_tokens": rules.max_output_tokens - done,
        "min_tokens": max(0, min(rules.min_tokens, rules.max_output_tokens) - done),
        "temperature": 0.0 if greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": True,
        "stop_token_ids": sorted(rules.eos_ids | rules.stop_ids),
    }
    if not greedy:
        options["seed"] = seq.seed % _SEEDS
    if bias or sampling.logit_bias:
        options["logit_bias"] = bias | {
            token: value for token, value in sampling.logit_bias.items() if token not in bias
        }
    if sampling.allowed_token_ids is not None:
        options["allowed_token_ids"] = sorted({*sampling.allowed_token_ids} - bias.keys())
    if sampling.beside is not None:
        options["logprobs"] = sampling.beside
    if sampling.logprob_token_ids:
        options["logprob_token_ids"] = list(sampling.logprob_token_ids)
    if seq.wants_scores:
        options["prompt_logprobs"] = sampling.prompt_logprobs
    mark = None if limits.images is None else limits.images.placeholder
    message: dict[str, Any] = {
        "prompt": [mark if token == IMAGE else token for token in seq.tokens().tolist()],
        "sampling": options,
        "priority": request.priority,
        "salt": request.salt,
    }
    if seq.images:
        files = {content_hash_of(bytes(data)): data for data in cast(Sequence[bytes], request.images)}
        placed = [files[image.content_hash] for _, image in sorted(seq.images.items())]
        message["images"] = [b64encode(data).decode() for data in placed]
    if isinstance(grammar := grammar_of(seq.constraint), GrammarState):
        message["grammar"] = grammar.source
    if isinstance(seq.constraint, BannedState):
        message["bad"] = [list(tokens) for tokens in seq.constraint.sequences]
    return message


def lark_of(source: str) -> str:
    """The Lark grammar of a compiled constraint, whose source is one, or has some in JSON: the others stand in the
    first by their names."""
    if not source.startswith("{"):
        return _LARK + _spaced(source)
    first, *others = json.loads(source)["grammars"]
    texts = {f"@{one['name']}": f"%lark {{\n{_spaced(one['lark_grammar'])}\n}}" for one in others}
    return _LARK + _PART.sub(lambda part: texts.get(part[0], part[0]), _spaced(first["lark_grammar"]))


def _spaced(grammar: str) -> str:
    """The grammar of a schema with its whitespace beside brackets, commas and colons: vLLM's llguidance does not
    know `ignore_once`, and would allow blanks without an end."""
    if not grammar.startswith(HEAD):
        return grammar

    def spaced(line: re.Match[str]) -> str:
        name, text = line.groups()
        before, behind = (f"/{WHITESPACE}/" * (text in marks) for marks in (_BLANK_BEFORE, _BLANK_BEHIND))
        return f"{name}: {before} ({text}) {behind}"

    return _TERMINAL.sub(spaced, grammar.removeprefix(HEAD))


def scored(token: int, entries: list[tuple[int, float, int]], named: Mapping[int, int], top: int) -> TokenLogprobs:
    """The log-probabilities at a position. `named`: the tokens that are asked for by id, with their places."""
    by_token = {other: (value, rank) for other, value, rank in entries}
    if named:
        chosen = [other for other in named if other in by_token]
    else:
        ranked = sorted(by_token, key=lambda other: by_token[other][1])
        chosen = [other for other in ranked if by_token[other][1] <= top][:top]
    value = by_token[token][0] if token in by_token else 0.0
    return TokenLogprobs(token, value, [(other, by_token[other][0]) for other in chosen])
