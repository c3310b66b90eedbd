"""The list of patches and private names is complete, and true of the installed Celery, kombu and redis-py."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from petiole.tasks.worker.boot.patches import PATCHES, PRIVATE, Private
from tests.support.parsing import parsed
from tests.support.site import REPOSITORY

LIBRARIES = ("amqp", "celery", "kombu", "redis")
NOT_THEIRS = {"os", "atexit"}  # modules whose private names are used, too
OF_TUPLES = {"_replace", "_asdict", "_fields"}  # a named tuple's, which are public
FILES = [
    file
    for folder in ("tasks", "petiole/testing")
    for file in (REPOSITORY / folder).rglob("*.py")
    if file.name != "_supervisor.py"
]
LISTED = {name for names in PRIVATE.values() for name in names}
PATCHED = {name.partition(":")[2] for patch in PATCHES for name in patch.names}


def owner(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)


@cache
def source(of: Any) -> str:
    """Of a class or a module. `inspect` would parse the whole module again for each class."""
    module = inspect.getmodule(of)
    if module is None or of is module:
        return of_module(of)
    return classes(module).get(of.__qualname__, "")


@cache
def of_module(module: Any) -> str:
    try:
        return inspect.getsource(module)
    except (OSError, TypeError):
        return ""


@cache
def classes(module: Any) -> dict[str, str]:
    """The source of each class of a module by its qualified name."""
    lines, found = of_module(module).splitlines(keepends=True), {}

    def look(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                first = min([child.lineno, *(one.lineno for one in child.decorator_list)])
                found[prefix + child.name] = "".join(lines[first - 1 : child.end_lineno])
                look(child, f"{prefix}{child.name}.")
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                look(child, f"{prefix}{child.name}.<locals>.")
            else:
                look(child, prefix)

    look(parsed("".join(lines)), "")
    return found


ENTRIES = [(path, name, private) for path, names in PRIVATE.items() for name, private in names.items()]


@pytest.mark.parametrize(("path", "name", "private"), ENTRIES, ids=lambda value: str(value)[:40])
def test_a_private_name_is_as_it_was(path: str, name: str, private: Private) -> None:
    holder = owner(path)
    found = inspect.getattr_static(holder, name, None)
    lineage = inspect.getmro(holder) if inspect.isclass(holder) else [holder]
    assert found is not None or any(re.search(rf"\bself\.{name}\b", source(one)) for one in lineage)
    signature = str(inspect.signature(found)) if inspect.isfunction(found) else ""
    assert signature == private.signature


@pytest.mark.parametrize("name", [name for patch in PATCHES for name in patch.names])
def test_what_is_patched_exists(name: str) -> None:
    assert owner(name) is not None


# ---------------------------------------------------------------- nothing is missing


def own_names(files: list[Path]) -> set[str]:
    """Private names that Petiole's own classes and functions define."""
    text = "\n".join(file.read_text() for file in files)
    in_code = re.findall(r"(?:self\.|cls\.|def )(_[a-z]\w*)(?:\(| =|: )", text)
    in_classes = re.findall(r"^ +(_[a-z]\w*)(?:: [^=\n]+)? = ", text, re.M)
    return {*in_code, *in_classes}


def inherited(module: Any) -> Iterator[str]:
    """The private names of the libraries that a class of `module` overrides or uses on itself."""
    for kind in vars(module).values():
        if not inspect.isclass(kind) or kind.__module__ != module.__name__:
            continue
        stock = [one for one in kind.__mro__ if one.__module__.partition(".")[0] in LIBRARIES]
        theirs = {
            name for one in stock for name in re.findall(r"(?:\bself\.|def |^    )(_[a-z]\w*)", source(one), re.M)
        }
        named = set(re.findall(r"(?:self|cls|super\(\))\.(_[a-z]\w*)", source(kind))) | set(vars(kind))
        yield from sorted(named & theirs)


def reached(tree: ast.Module) -> Iterator[str]:
    """Private names of objects other than `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"_[a-z]\w*", node.attr):
            value = ast.unparse(node.value)
            if value not in {"self", "cls", "super()"} | NOT_THEIRS:
                yield node.attr


def test_every_private_name_that_is_used_is_listed() -> None:
    known, missing = own_names(FILES) | LISTED | PATCHED | OF_TUPLES, set()
    for file in FILES:
        parts = file.relative_to(REPOSITORY).with_suffix("").parts
        parts = parts[:-1] if parts[-1] == "__init__" else parts
        module = ".".join(parts if parts[0] == "petiole" else ("petiole", *parts))
        missing |= {(module, name) for name in reached(parsed(file.read_text())) if name not in known}
        missing |= {(module, name) for name in inherited(import_module(module)) if name not in LISTED}
    assert missing == set()


def test_every_private_name_that_is_listed_is_used() -> None:
    text = "\n".join(file.read_text() for file in FILES if file.name != "patches.py")
    assert {name for name in LISTED if not re.search(rf"\b{name}\b", text)} == set()
