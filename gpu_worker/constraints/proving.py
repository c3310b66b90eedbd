"""A constraint becomes a grammar, and is compiled for the first time, in a child.

The grammar library recurses natively, and a stack that is too small ends its process. Some constraints take
minutes or gigabytes. What the library compiles cannot be passed between processes. So the child only proves that a
constraint can be compiled, within limits and on a smaller stack, and returns its grammar. Then this process
compiles the grammar itself, on a thread of its own and without Python's lock. Proofs and refusals are kept."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path

from petiole.gpu_worker.children import Child, ChildEnded
from petiole.gpu_worker.constraints.grammar import Vocabulary, VocabularyDescription
from petiole.gpu_worker.exceptions import InvalidRequest
from petiole.gpu_worker.text import Tokenizer

CPU_S = 5.0
MEMORY_BYTES = 3 * 2**29
"""The child's address space."""
JOB = Path(__file__).with_name("_proving_process.py")

_child = Child(str(JOB))


def proved(kind: str, text: str, vocabulary: Vocabulary, tokenizer: Tokenizer) -> str:
    """The grammar of a constraint, whose value is given as JSON text. Raises InvalidRequest."""
    found = vocabulary.proofs.get((kind, text))
    if found is None:
        found = _asked(kind, text, vocabulary, tokenizer)
        vocabulary.proofs.keep((kind, text), found, len(text) + len(found if isinstance(found, str) else ""))
    if isinstance(found, InvalidRequest):
        raise InvalidRequest(found.field, found.limit, found.value)
    return found


def _asked(kind: str, text: str, vocabulary: Vocabulary, tokenizer: Tokenizer) -> str | InvalidRequest:
    try:
        answer = _child.ask([vocabulary.key, None, kind, text])
        if "unknown" in answer:
            answer = _child.ask([vocabulary.key, astuple(VocabularyDescription.of(tokenizer)), kind, text])
    except ChildEnded:
        limit = f"must compile within {CPU_S:g} s of processor time and {MEMORY_BYTES} bytes of memory"
        return InvalidRequest(f"constraint.{kind}", limit, f"{len(text)} characters that take more")
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    return InvalidRequest(*answer["refused"]) if "refused" in answer else str(answer["source"])
