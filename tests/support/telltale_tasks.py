"""Tasks of the same app whose results and errors have a user's text."""

from __future__ import annotations

from celery import Task
from celery.exceptions import Ignore, Reject

from petiole.tasks.app.application import app


@app.task(name="indiscreet.answer")
def answer(text: str) -> str:
    return text


@app.task(name="indiscreet.fail")
def fail(text: str) -> None:
    try:
        raise KeyError(text)
    except KeyError as error:
        raise RuntimeError(text) from error


@app.task(name="indiscreet.expected", throws=(ValueError,))
def expected(text: str) -> None:
    raise ValueError(text)


@app.task(name="indiscreet.again", bind=True, max_retries=1)
def again(self: Task, text: str) -> None:
    raise self.retry(exc=LookupError(text), countdown=0)


@app.task(name="indiscreet.rejected")
def rejected(text: str) -> None:
    raise Reject(text)


@app.task(name="indiscreet.ignored")
def ignored(text: str) -> None:
    raise Ignore(text)
