"""Compiles constraints for the first time: a job of `children`, run in a process of its own.

It compiles on a smaller stack than `grammar` does later. Copies, masks and ends are proved on an ordinary stack,
where the engine's are, too. Nobody imports this file."""

from __future__ import annotations

import json
import signal
import time
from collections import OrderedDict
from typing import Any

import numpy as np

from petiole.gpu_worker.constraints import grammar
from petiole.gpu_worker.constraints.compiler import source_of
from petiole.gpu_worker.constraints.grammar import Grammar, Vocabulary, VocabularyDescription, on_large_stack
from petiole.gpu_worker.constraints.proving import CPU_S, MEMORY_BYTES
from petiole.gpu_worker.exceptions import InvalidRequest

MASK_S = 0.1
"""Processor time of the masks before and after the first token, once the automata are built."""

_PROVED_STACK_BYTES = 192 * 2**20
_KEPT = 2
"""Vocabularies: a reload may bring another one."""

_vocabularies: OrderedDict[str, Vocabulary] = OrderedDict()


def answer(question: tuple[str, list[Any] | None, str, str]) -> dict[str, Any]:
    """The grammar of a constraint that can be compiled, or why it is refused. `question`: the key of the
    vocabulary, what it is made of, and kind and text of the constraint. If the second is missing, the vocabulary
    may be unknown."""
    key, described, kind, text = question
    grammar.STACK_BYTES = _PROVED_STACK_BYTES
    try:
        if key not in _vocabularies:
            if described is None:
                return {"unknown": key}
            _vocabularies[key] = Vocabulary(VocabularyDescription(*described))
            while len(_vocabularies) > _KEPT:
                _vocabularies.popitem(last=False)
        _vocabularies.move_to_end(key)
        signal.setitimer(signal.ITIMER_PROF, CPU_S)
        return {"source": _proved(_vocabularies[key], kind, text)}
    except InvalidRequest as error:
        return {"refused": [error.field, error.limit, error.value]}
    except MemoryError:
        limit = f"must compile within {MEMORY_BYTES} bytes of memory"
        return {"refused": [f"constraint.{kind}", limit, f"{len(text)} characters that take more"]}
    except Exception as error:
        return {"failed": repr(error)}


def _proved(vocabulary: Vocabulary, kind: str, text: str) -> str:
    field, value = f"constraint.{kind}", json.loads(text)
    source = on_large_stack(lambda: source_of(kind, text, vocabulary.special))
    _check_masks(Grammar(vocabulary, source, field, value), field)
    return source


def _check_masks(made: Grammar, field: str) -> None:
    """Refuse a grammar whose masks take long: each mask delays the whole batch."""
    state, mask = made.start(), np.zeros(made.vocabulary.words, np.int32)
    for _ in range(2):
        took = []
        for _ in range(3):
            fork, begun = state.fork(), time.thread_time()
            fork.fill_mask(mask)
            took.append(time.thread_time() - begun)
        if min(took) > MASK_S:
            limit = f"must need at most {MASK_S} s of processor time for a mask"
            raise InvalidRequest(field, limit, f"{min(took):.2f} s at the beginning of the output")
        words = np.flatnonzero(mask)
        first = int(mask[words[0]]) & 0xFFFFFFFF
        if not state.consume(32 * int(words[0]) + (first & -first).bit_length() - 1) or state.finished:
            return
