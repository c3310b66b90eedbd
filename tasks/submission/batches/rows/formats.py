"""The formats of files of rows, by the endings of their names: the same for inputs and outputs.

A name says how a file is read or written, so a file never has another format than its name."""

from __future__ import annotations

import codecs
from pathlib import PurePath
from typing import Literal, NamedTuple, get_args

from petiole.tasks.errors import InvalidRequest

Kind = Literal["jsonl", "csv", "tsv", "parquet"]
KINDS: tuple[Kind, ...] = get_args(Kind)
DELIMITERS = {"csv": ",", "tsv": "\t"}
_ENDINGS: dict[str, Kind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}


class FileFormat(NamedTuple):
    """`zipped`: by gzip."""

    kind: Kind
    zipped: bool = False


def of_input(location: str, given: str | None = None) -> FileFormat:
    """`given`: instead of the name's. Standard input (`-`) is JSONL. Raises `InvalidRequest`."""
    ending, zipped = _ending(location)
    kind = given or _ENDINGS.get(ending) or ("jsonl" if location == "-" or ending == ".json" else None)
    for known in KINDS:
        if kind == known:
            return FileFormat(known, zipped)
    raise InvalidRequest("format", f"must be one of {', '.join(KINDS)} for {location}", given)


def of_output(location: str) -> FileFormat:
    """A name without an ending, or with digits for one, is JSONL's; `.json` is not, since lines of JSON are no
    JSON. Raises `InvalidRequest`."""
    if location == "-":
        limit = "must be a file, since a journal beside it says which rows have ended"
        raise InvalidRequest("output", limit, location)
    ending, zipped = _ending(location)
    kind = "jsonl" if not ending or ending[1:].isdecimal() else _ENDINGS.get(ending)
    if kind is None or (zipped and kind == "parquet"):
        *endings, last = sorted(_ENDINGS)
        limit = f"must end in {', '.join(endings)} or {last}; text also in .gz"
        raise InvalidRequest("output", limit, location)
    return FileFormat(kind, zipped)


def _ending(location: str) -> tuple[str, bool]:
    name = location.rpartition("/")[2].lower()
    return PurePath(name.removesuffix(".gz")).suffix, name.endswith(".gz")


def encoding_of(name: str) -> str:
    """The encoding's own name. Raises `InvalidRequest`."""
    try:
        found = codecs.lookup(name)
        "".encode(found.name)  # some are not of text
    except LookupError:
        raise InvalidRequest("encoding", "must be one that Python knows, such as utf-16 or cp1252", name) from None
    return found.name
