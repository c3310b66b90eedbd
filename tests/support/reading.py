"""The names that code reads of a message, found in the code: a header, a property or an option that is read is
among them on the day on which it is added."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import petiole.tasks.worker
from petiole.contract.requests.count import CountRequest
from petiole.contract.tasks import TASKS
from petiole.tasks.wire.headers import KNOWN, OWN, RESERVED
from petiole.tasks.worker.broker.gate import task_message as gate
from tests.support.parsing import parsed

READERS = (
    *("celery.app.amqp", "celery.app.task", "celery.app.trace", "celery.app.log", "celery.canvas"),
    *("celery.backends.base", "celery.backends.redis", "celery.utils.log"),
    *("celery.worker.consumer.consumer", "celery.worker.request", "celery.worker.strategy"),
    *("kombu.compression", "kombu.message", "kombu.transport.redis", "kombu.transport.virtual.base"),
    *(module.name for module in pkgutil.walk_packages(petiole.tasks.worker.__path__, "petiole.tasks.worker.")),
)
"""Modules that read messages."""


def tree_of(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return parsed(Path(spec.origin).read_text())


def _keys(tree: ast.AST) -> Iterator[str]:
    """The constants by which a module looks into mappings."""
    for node in ast.walk(tree):
        match node:
            case ast.Subscript(slice=ast.Constant(value=str(name))):
                yield name
            case ast.Call(func=ast.Attribute(attr="get" | "pop"), args=[ast.Constant(value=str(name)), *_]):
                yield name
            case ast.Call(func=ast.Name(id="get" | "_get"), args=[ast.Constant(value=str(name)), *_]):
                yield name
            case ast.Compare(left=ast.Constant(value=str(name)), ops=[ast.In() | ast.NotIn()]):
                yield name
            case ast.MatchMapping(keys=keys):
                yield from (key.value for key in keys if isinstance(key, ast.Constant))


def _words(tree: ast.AST) -> Iterator[str]:
    """The constants with which a module compares what it has read."""
    for node in ast.walk(tree):
        match node:
            case ast.MatchValue(value=ast.Constant(value=str(word))):
                yield word
            case ast.Compare(ops=[ast.Eq() | ast.NotEq()], comparators=[ast.Constant(value=str(word))]):
                yield word
            case ast.Compare(ops=[ast.In() | ast.NotIn()], comparators=[ast.Tuple(elts=words)]):
                yield from (word.value for word in words if isinstance(word, ast.Constant))


@cache
def names() -> tuple[str, ...]:
    """In a message, at any place, but for options."""
    found = {name for module in READERS for name in _keys(tree_of(module))}
    return tuple(sorted({*found, *KNOWN, *OWN, *RESERVED, *gate._EMBED}))


@cache
def _trees_of_the_gateway() -> tuple[ast.Module, ...]:
    """The modules that read bodies of HTTP requests."""
    gateway = importlib.import_module("petiole.gateway")
    found = (module.name for module in pkgutil.walk_packages(gateway.__path__, "petiole.gateway."))
    contract = ("generation", "tool_choice", "images")
    return tuple(map(tree_of, (*found, *(f"petiole.contract.requests.{name}" for name in contract))))


@cache
def names_of_bodies() -> tuple[str, ...]:
    """In a body, below its own parameters."""
    return tuple(sorted({name for tree in _trees_of_the_gateway() for name in _keys(tree)}))


@cache
def words_of_bodies() -> tuple[str, ...]:
    """Values with which bodies are compared, such as roles and types."""
    found = {word for tree in _trees_of_the_gateway() for word in _words(tree)}
    return tuple(sorted(word for word in found if isinstance(word, str)))


@cache
def options() -> tuple[str, ...]:
    """Of all tasks."""
    return tuple(
        sorted(
            {
                name
                for kind in (CountRequest, *(task.request for task in TASKS.values()))
                for name in kind.model_fields
            }
        )
    )
