"""What is a message, and what is none. `tests/fuzz` tries what nobody thought of."""

from __future__ import annotations

import json
import lzma
import random
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from hypothesis import given, strategies as st
from kombu import compression

from petiole.tasks.errors import InvalidRequest
from petiole.tasks.wire.headers import check_submission
from petiole.tasks.worker.broker import gate
from petiole.tasks.worker.broker.gate import bodies
from tests.support import hostile
from tests.support.hostile import Received

GOOD = {"task": "tasks.generate", "id": "an-id"}
EMBED: dict[str, Any] = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def message(headers: Any, body: Any = ((), {}, {}), content_type: str = "application/json") -> Received:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Received(
        body=raw, headers=headers, content_type=content_type, content_encoding="utf-8", accept={"application/json"}
    )


def refused(given: Any) -> gate.RefusedMessage:
    assert isinstance(given, gate.RefusedMessage), given
    given.reason.encode()
    return given


def taken(given: Any) -> gate.Task:
    assert isinstance(given, gate.Task), given
    return given


def envelope(**changes: Any) -> bytes:
    """A valid one with `changes` to its properties; None leaves one out."""
    valid = hostile.message("an-id", "hello")
    valid["properties"] = {name: v for name, v in {**valid["properties"], **changes}.items() if v is not None}
    return hostile.raw(valid)


# ---------------------------------------------------------------- what kombu reads


def test_a_valid_envelope_passes_with_its_body_decoded() -> None:
    read = gate.envelope(envelope())
    assert isinstance(read, gate.MessageArguments)
    args, kwargs, embed = json.loads(read.payload["body"])
    assert (args, kwargs["prompt"], embed) == ([], "hello", EMBED)
    assert "body_encoding" not in read.payload["properties"]
    assert taken(gate.task(hostile.received(read.payload))).task_id == "an-id"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"body_encoding": "rot13"}, "properties.body_encoding must be base64 or null, got 'rot13'"),
        ({"body_encoding": ["base64"]}, "properties.body_encoding"),
        ({"delivery_info": "x"}, "properties.delivery_info must be an object, got 'x'"),
        ({"delivery_info": [1]}, "properties.delivery_info"),
        ({"delivery_info": {"routing_key": 5}}, "properties.delivery_info.routing_key"),
        ({"correlation_id": 5}, "properties.correlation_id"),
        ({"reply_to": "\ud800"}, "properties.reply_to"),
        ({"priority": "high"}, "properties.priority"),
        ({"priority": 10**400}, "properties.priority"),
        ({"priority": float("inf")}, "properties.priority"),
    ],
)
def test_what_kombu_trips_over_is_refused_with_the_id_of_the_task(changes: dict[str, Any], says: str) -> None:
    answer = refused(gate.envelope(envelope(**changes)))
    assert says in answer.reason
    assert answer.task_id == "an-id"


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"5",
        b"null",
        b"[1,2]",
        b"{}",
        b"{broken",
        b"\xff",
        b'{"headers": 1}',
        b'{"properties": {}, "headers": {}, "body": 5}',
        b'{"properties": {}, "headers": {}, "body": "x", "content-type": 5}',
        b'{"properties": {"body_encoding": "base64"}, "headers": {}, "body": "x"}',
        b'{"properties": {}, "headers": {}, "body": "\\ud800"}',
        b"[" * 100_000 + b"]" * 100_000,
        b'{"properties": {"a": ' + b"[" * 300 + b"]" * 300 + b'}, "headers": {}, "body": ""}',
        b'{"properties": {"a": 1' + b"0" * 10_000 + b'}, "headers": {}, "body": ""}',
    ],
    ids=lambda raw: repr(raw[:60]),
)
def test_garbage_is_refused(raw: bytes) -> None:
    refused(gate.envelope(raw))


def test_what_a_stock_producer_may_leave_out_may_be_missing() -> None:
    read = gate.envelope(envelope(priority=None, reply_to=None, delivery_info=None, correlation_id=None))
    assert isinstance(read, gate.MessageArguments)


def test_a_priority_as_text_is_one_as_for_kombu() -> None:
    read = gate.envelope(envelope(priority="3"))
    assert isinstance(read, gate.MessageArguments)
    assert read.payload["properties"]["priority"] == 3


def test_a_consumer_tag_in_the_message_is_not_kombus() -> None:
    read = gate.envelope(envelope(delivery_info={"routing_key": "petiole", "consumer_tag": [1]}))
    assert isinstance(read, gate.MessageArguments)
    assert read.payload["properties"]["delivery_info"] == {"routing_key": "petiole"}


@given(st.binary(max_size=50) | json_values.map(lambda value: json.dumps(value).encode()))
def test_the_gate_itself_never_fails(raw: bytes) -> None:
    assert isinstance(gate.envelope(raw), gate.RefusedMessage)


# ---------------------------------------------------------------- what Celery reads


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"timelimit": [None, None]},
        {"timelimit": [10, 2.5]},
        {"timelimit": [0, None]},
        {"eta": "2030-01-01T00:00:00+00:00"},
        {"expires": "2030-01-01"},
        {"expires": None},
        {"group": "g", "group_index": 0, "retries": 3, "stamps": {}, "stamped_headers": []},
        {"stamps": {"who": [1]}, "stamped_headers": ["who"]},
        {"id": "x" * 255},
        {"headers": {"mine": 1}, "mine": {"any": ["thing"]}},
        {"argsrepr": "'\ud800'", "shadow": "name"},
    ],
)
def test_what_celery_sends_is_taken(changes: dict[str, Any]) -> None:
    assert taken(gate.task(message({**GOOD, **changes}))).task_id == {**GOOD, **changes}["id"]


def test_the_older_protocol_is_taken() -> None:
    older = {
        "task": "tasks.generate",
        "id": "an-id",
        "args": [],
        "kwargs": {"prompt": "p"},
        "taskset": "g",
        "x": 1,
    }
    task = taken(gate.task(message({}, older)))
    assert (task.name, task.task_id) == ("tasks.generate", "an-id")
    assert task.body == {**{name: older[name] for name in ("task", "id", "args", "kwargs")}, "group": "g"}


@pytest.mark.parametrize(
    ("headers", "body", "says"),
    [
        (GOOD, b"not json", "cannot be decoded"),
        (GOOD, 5, "must be [args, kwargs, embed]"),
        (GOOD, [[], [], {}], "must be [args, kwargs, embed]"),
        (GOOD, {"prompt": "p"}, "must be [args, kwargs, embed]"),
        (GOOD, [[], {}, {"id": 5}], "body.embed must have no more than callbacks"),
        (GOOD, [[], {}, {"_children": 5}], "body.embed"),
        (GOOD, [[], {}, {"callbacks": 5}], "body.embed.callbacks must be a list of signatures, got 5"),
        (GOOD, [[], {}, {"callbacks": [5]}], "body.embed.callbacks must be a signature"),
        (GOOD, [[], {}, {"chain": [{"task": "t", "subtask_type": "nothing"}]}], "body.embed.chain"),
        (GOOD, [[], {}, {"chord": {"task": "t", "options": {"task_id": "\ud800"}}}], "body.embed.chord.options"),
        (GOOD, b"[[], {" + b'"a":{' * 300 + b"}" * 301 + b", {}]", "body must have at most 200 levels"),
        ({**GOOD, "timelimit": 5}, [[], {}, {}], "headers.timelimit"),
        ({**GOOD, "timelimit": [-1, None]}, [[], {}, {}], "headers.timelimit"),
        ({**GOOD, "timelimit": [10**400, None]}, [[], {}, {}], "headers.timelimit"),
        ({**GOOD, "retries": True}, [[], {}, {}], "headers.retries"),
        ({**GOOD, "retries": 10**400}, [[], {}, {}], "headers.retries"),
        ({**GOOD, "eta": "soon"}, [[], {}, {}], "headers.eta"),
        ({**GOOD, "eta": "0001-01-01"}, [[], {}, {}], "headers.eta"),
        ({**GOOD, "expires": 60}, [[], {}, {}], "headers.expires must be a time in ISO 8601"),
        ({**GOOD, "expires": ""}, [[], {}, {}], "headers.expires"),
        ({**GOOD, "compression": "nope"}, [[], {}, {}], "headers.compression"),
        ({**GOOD, "compression": 5}, [[], {}, {}], "headers.compression"),
        ({**GOOD, "root_id": "\ud800"}, [[], {}, {}], "headers.root_id"),
        ({**GOOD, "id": ""}, [[], {}, {}], "headers.id"),
        ({**GOOD, "id": "\ud800"}, [[], {}, {}], "headers.id must be text of 1 to 255 bytes"),
        ({**GOOD, "id": "ä" * 128}, [[], {}, {}], "headers.id must be text of 1 to 255 bytes"),
        ({**GOOD, "id": "x" * 10_000}, [[], {}, {}], "(10000 in all)"),
        ({**GOOD, "mine": [{"\ud800": 1}]}, [[], {}, {}], "headers must have only text that UTF-8 can encode"),
        ({**GOOD, "\ud800": 1}, [[], {}, {}], "headers must have only text that UTF-8 can encode"),
        ({**GOOD, "mine": "x" * 262_144}, [[], {}, {}], "headers must have at most 262144 characters"),
        (GOOD, [[], {}, {"mine": "\ud800"}], "body.embed must have only text"),
        (GOOD, [[], {}, {"chain": [{"task": "t", "options": {"queue": "\ud800"}}]}], "body.embed.chain.options"),
        ({}, [[], {}, {}], "must name a task"),
        ({}, {"task": "t", "id": 5}, "body.id"),
        ({"id": 5}, {"task": "t", "id": "x"}, "headers.id"),
        ({}, {"task": "t", "id": "x", "args": 5}, "must be [args, kwargs, embed]"),
        ({}, {"task": "t", "id": "x", "callbacks": 5}, "body.embed.callbacks"),
    ],
)
def test_the_reason_names_what_is_wrong(headers: Any, body: Any, says: str) -> None:
    odd = message(GOOD, body)
    odd.headers = headers  # kombu itself would notice some
    assert says in refused(gate.task(odd)).reason


def test_a_body_may_have_no_embed() -> None:
    """Celery's request asks it for a chord all the same."""
    assert taken(gate.task(message(GOOD, [[], {"prompt": "p"}, None]))).body == [[], {"prompt": "p"}, {}]


def test_headers_must_be_an_object() -> None:
    odd = message(GOOD)
    odd.headers = [1]
    assert refused(gate.task(odd)).reason == "headers must be an object, got [1]"


@pytest.mark.parametrize(
    "name", ["_children", "get", "update", "is_eager", "callbacks", "delivery_info", "__class__"]
)
def test_a_header_that_would_replace_an_attribute_of_celerys_request_is_left_out(name: str) -> None:
    assert taken(gate.task(message({**GOOD, name: 5, "mine": 1}))).headers == {**GOOD, "mine": 1}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("tenant", value) for value in ("", 5, ["acme"], "x" * 256, "\ud800")),
        *(
            ("petiole-held", value)
            for value in (5, ["key"], ["key", 1, 2, 10**400], ["key", 1, 2, True], ["\ud800", 1, 2, 3])
        ),
        *(("petiole-sent", value) for value in ("now", float("nan"), -1, 10**400)),
        ("petiole-affinity", "x" * 256),
    ],
)
def test_a_wrong_header_of_petioles_own_is_left_out_and_refused_to_a_producer(name: str, value: Any) -> None:
    assert taken(gate.task(message({**GOOD, name: value}))).headers == GOOD
    with pytest.raises(InvalidRequest, match=f"headers.{name}"):
        check_submission({"headers": {name: value}}, ["json"])


def test_text_in_arguments_is_the_tasks_own_affair() -> None:
    body = [["\ud800"], {"\ud800": "\ud800"}, {"chain": [{"task": "t", "kwargs": {"a": "\ud800"}}]}]
    assert taken(gate.task(message({**GOOD, "argsrepr": "\ud800"}, body))).body == body


def test_what_canvases_send_is_taken() -> None:
    app = Celery(set_as_current=False)

    def one() -> Any:
        return app.signature("tasks.generate", kwargs={"prompt": "p"}, immutable=True)

    canvases = [
        one(),
        chain(one(), one(), app=app),
        group([one(), chain(one(), group([one(), one()], app=app), app=app)], app=app),
        chord([one(), one()], chain(one(), one(), app=app), app=app),
    ]
    for canvas in canvases:
        canvas.freeze("a-canvas")
        embed = json.loads(json.dumps({"callbacks": [canvas], "chain": [canvas, one()], "chord": canvas}))
        assert isinstance(gate.task(message(GOOD, [[], {}, {**EMBED, **embed}])), gate.Task)


@given(
    headers=st.dictionaries(
        st.sampled_from(["task", "id", "timelimit", "eta", "expires", "group", "stamps", "retries", "_children"]),
        json_values,
    ),
    body=json_values | st.binary(max_size=10),
)
def test_nothing_makes_the_gate_for_tasks_fail(headers: dict[str, Any], body: Any) -> None:
    assert isinstance(gate.task(message(headers, body)), gate.Task | gate.RefusedMessage)


# ---------------------------------------------------------------- compression


@pytest.mark.parametrize("name", ["gzip", "bzip2", "lzma"])
def test_a_small_body_does_not_inflate_without_a_limit(name: str) -> None:
    bodies.install()
    compressed, kind = compression.compress(b"x" * 5000, name)
    assert compression.decompress(compressed, kind) == b"x" * 5000
    bomb, _ = compression.compress(bytes(bodies.SMALL_BYTES + 1), name)
    with pytest.raises(bodies.TooLargeError, match=f"at most {bodies.SMALL_BYTES} bytes"):
        compression.decompress(bomb, kind)


@pytest.mark.parametrize("name", ["gzip", "bzip2", "lzma"])
def test_text_of_the_largest_size_inflates_and_a_byte_more_does_not(name: str) -> None:
    bodies.install()
    most = bodies.FORMATS[compression.get_encoder(name)[1]].most_bytes
    text = random.Random(0).randbytes(most // 16)
    for size, fits in ((most, True), (most + 1, False)):
        body, kind = compression.compress((text * 17)[:size], name)
        if fits:
            assert len(compression.decompress(body, kind)) == size
        else:
            with pytest.raises(bodies.TooLargeError):
                compression.decompress(body, kind)


def test_a_header_that_asks_for_a_gigabyte_gets_none() -> None:
    greedy = lzma.compress(b"x", filters=[{"id": lzma.FILTER_LZMA2, "dict_size": 2**30}])
    with pytest.raises(lzma.LZMAError, match=r"[Mm]emory"):
        bodies.FORMATS["application/x-lzma"].inflate(greedy)


def test_a_format_without_a_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "_encoders", dict(compression._encoders))
    monkeypatch.setattr(compression, "_decoders", dict(compression._decoders))
    compression.register(bytes, bytes, "application/zstd")
    bodies.install()
    with pytest.raises(ValueError, match=r"must be compressed as one of .*, got application/zstd"):
        compression.decompress(b"x", "application/zstd")


@pytest.mark.parametrize("encoding", ["punycode", "idna", "unicode_escape", "nope", "utf-7"])
def test_an_encoding_that_may_take_for_ever_is_refused(encoding: str) -> None:
    given = message(GOOD, b"-" + b"a" * 100_000, content_type="text/plain")
    given.content_encoding = encoding
    assert "content_encoding must be one of" in refused(gate.task(given)).reason


def test_json_that_would_fill_the_memory_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MOST_VALUES", 100)
    monkeypatch.setattr(bodies.json, "loads", lambda text: pytest.fail("it is parsed"))
    refused = gate.envelope(b"[" + b"[]," * 100 + b"[]]")
    assert isinstance(refused, gate.RefusedMessage)
    assert "at most 100 lists, objects, commas and colons, got 202" in refused.reason


def test_a_body_that_would_fill_the_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = message({"task": "tasks.generate", "id": "a"}, [[], {"prompt": [1] * 100}, {}])
    monkeypatch.setattr(bodies, "MOST_VALUES", 100)
    refused = gate.task(given)
    assert isinstance(refused, gate.RefusedMessage)
    assert "body must have at most 100 lists, objects, commas and colons" in refused.reason


def test_a_call_of_many_names_is_refused_before_anybody_copies_it() -> None:
    given = message(GOOD, [[], {f"option{k}": k for k in range(1025)}, {}])
    assert refused(gate.task(given)).reason == "body.kwargs must have at most 1024 names, got 1025"
    given = message(GOOD, [[], {f"option{k}": k for k in range(1024)}, {}])
    assert isinstance(gate.task(given), gate.Task)
