"""JSON schemas as grammars.

The grammar library compiles schemas, too. It lacks ranges of numbers that hold, keys that match several rules, and
most of what pydantic's classes ask for. So the structure of a schema becomes rules in Lark's notation here, and
numbers become terminals. Text and multiples are left to the library, as schemas of one value.

    grammar_writer  from nodes to the rules of a grammar
    object_keys     keys that an object's schema does not name
    intersection    what several schemas allow together
    parsing         from the keywords of a schema to nodes
    rules           the rules of a grammar, and their text
    numbers         numbers within bounds
    string_formats  the formats of strings
    patterns        regular expressions that search
    nodes           what a schema allows, as data
"""

from __future__ import annotations

from typing import Any

from petiole.gpu_worker.constraints.schema.grammar_writer import WHITESPACE, Writer
from petiole.gpu_worker.constraints.schema.parsing import Reader
from petiole.gpu_worker.exceptions import InvalidRequest

__all__ = ["WHITESPACE", "grammar_of"]


def grammar_of(field: str, schema: Any) -> str:
    """The grammar of the values that a schema allows, in Lark's notation. Raises InvalidRequest for `field`."""
    try:
        reader = Reader(field, schema)
        return Writer(field, reader.resolve).text(reader.root())
    except RecursionError:
        raise InvalidRequest(field, "must be nested less deeply, with its references", "too deep") from None
