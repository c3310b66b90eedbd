"""What Petiole changes in Celery and kombu, and which of their private names it relies on: one list of each.

    PATCHES   what is replaced in the libraries themselves, in a worker's process only (one method is replaced in
              producers, too: `tasks.app.interop`)
    PRIVATE   private names that Petiole overrides, calls or reads: here, and on the producer side

Everything else uses what Celery and kombu offer: settings, subclasses named by settings, bootsteps, routes.
`tests/tasks/worker/boot/test_patches.py` compares each entry with the installed versions, and looks for private
names that are missing here."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from petiole.tasks.worker import idempotency
from petiole.tasks.worker.boot import program
from petiole.tasks.worker.broker import consumer, rabbitmq, transport
from petiole.tasks.worker.broker.gate import bodies


class Patch(NamedTuple):
    names: tuple[str, ...]
    """The names that are replaced, or called to replace something, as `module:name`."""
    why: str
    install: Callable[[], None]


PATCHES = (
    Patch(
        ("kombu.transport:TRANSPORT_ALIASES", "kombu.transport:_transport_cache"),
        "kombu finds the transport of a URL in a table. A setting could name another transport, but then "
        "`redis://` URLs, lists of them and TLS options would not work as they do with kombu's.",
        transport.install,
    ),
    Patch(
        ("amqp.method_framing:Message",),
        "RabbitMQ's messages: properties that cannot be read would end the worker, and come back. Also replaces "
        "kombu's transports for RabbitMQ in its table.",
        rabbitmq.install,
    ),
    Patch(
        ("celery.worker.consumer.tasks:QoS",),
        "The prefetch count: kombu ignores a raise beyond the limit, but applies the matching decrement.",
        consumer.install,
    ),
    Patch(
        ("kombu.compression:register",),
        "kombu decompresses without a limit: a few kilobytes could become gigabytes of memory.",
        bodies.install,
    ),
    Patch(
        ("kombu.utils.uuid:uuid",),
        "The ids of links: Celery makes new ones when a completion is tried again, and each would be another "
        "task.",
        idempotency.install,
    ),
    Patch(
        ("celery.app.log:TaskFormatter",),
        "The loggers of tasks begin a line with the task's id, in which a producer may put a newline.",
        program.task_in_a_line,
    ),
)


class Private(NamedTuple):
    signature: str
    """A method's signature; empty for an attribute."""
    why: str


PRIVATE: dict[str, dict[str, Private]] = {
    "amqp.serialization:GenericContent": {
        "_load_properties": Private("(self, class_id, buf, offset)", "properties that cannot be read"),
    },
    "celery._state": {
        "_get_active_apps": Private("()", "the user's app, in the threads of a web server"),
        "_tls": Private("", "whether the process has a current app: Petiole's must not take its place"),
    },
    "celery.app.amqp:AMQP": {
        "_create_task_sender": Private("(self)", "RabbitMQ would drop a message with `expires` in silence"),
    },
    "celery.app.base:Celery": {
        "_backend_cache": Private("", "whether the app is in use before a test configures it"),
        "_conf": Private("", "other threads must not see a configuration without its defaults"),
        "_get_backend": Private("(self)", "stored errors have one module name, in any backend"),
        "_load_config": Private("(self)", "other threads must not see a configuration without its defaults"),
        "_pending": Private("", "tasks are made at their first use, as by `app.task`"),
        "_pending_defaults": Private("", "a configuration that raised is read again at the next access"),
        "_task_from_fun": Private(
            "(self, fun, name=None, base=None, bind=False, pydantic: bool = False, pydantic_strict: bool = False, "
            "pydantic_context: Optional[Dict[str, Any]] = None, pydantic_dump_kwargs: Optional[Dict[str, Any]] = "
            "None, **options)",
            "tasks are made at their first use, as by `app.task`, so that an import reads no setting",
        ),
        "_tasks": Private("", "another app may have a task of the same name, which Celery gives this one first"),
    },
    "celery.backends.asynchronous:BaseResultConsumer": {
        "_connection_errors": Private("", "what a lost connection raises"),
        "_reconnect": Private("(self)", "Celery's own method does not subscribe again"),
        "_wait_for_pending": Private(
            "(self, result, timeout=None, on_interval=None, on_message=None, **kwargs)",
            "each caller that waits hears of its own results, on any thread",
        ),
    },
    "celery.backends.base:Backend": {
        "_get_result_meta": Private(
            "(self, result, state, traceback, request, format_date=True, encode=False)",
            "a worker stores many results in one round trip, in Celery's form",
        ),
        "_pending_messages": Private("", "a result that was looked up is not kept a second time"),
    },
    "celery.backends.base:BaseKeyValueStoreBackend": {
        "_get_task_meta_for": Private("(self, task_id)", "a stored result that cannot be read"),
    },
    "celery.backends.redis:RedisBackend": {
        "_chord_part_return_script": Private("", "a claim to send a chord's body says for which task it is"),
        "_get_client": Private("(self)", "a command that is refused ends the try of a completion"),
        "_params_from_url": Private("(self, url, defaults)", "the address comes from the sentinels"),
        "_set": Private("(self, key, value, expires=None)", "redis-py warns of the command that Celery stores by"),
        "_transport_options": Private("", "the options of the sentinels"),
    },
    "celery.canvas:Signature": {
        "_app": Private("", "a generation's signature keeps its app, whichever canvas it is put in"),
        "_freeze": Private(
            "(self, _id=None, group_id=None, chord=None, root_id=None, parent_id=None, group_index=None)",
            "Celery's name of `freeze`, which is overridden",
        ),
        "_type": Private("", "a copy of a signature has the task of the original"),
    },
    "celery.concurrency.base:BasePool": {
        "_get_info": Private("(self) -> Dict[str, Any]", "the engine's figures in `celery inspect stats`"),
    },
    "celery.local:Proxy": {
        "_get_current_object": Private("(self)", "the app behind `current_app`"),
    },
    "celery.result:AsyncResult": {
        "_cache": Private("", "whether a result has been received"),
        "_get_task_meta": Private("(self)", "what is stored of a member of a group with tasks of two apps"),
        "_iter_meta": Private("(self, **kwargs)", "what is stored, before waiting for it"),
        "_maybe_set_cache": Private("(self, meta)", "give a result to the object that waits for it"),
    },
    "celery.utils.collections:ConfigurationView": {
        "_keys": Private("", "a setting is looked up without an exception for each of its names"),
        "_to_keys": Private("(self, key)", "the names of a setting"),
    },
    "celery.worker.request:Request": {
        "_announce_revoked": Private(
            "(self, reason, terminated, signum, expired)",
            "a revoked task ends as the engine says: `terminate` only asks for it",
        ),
        "_apply_result": Private("", "Celery's weak reference to the handle of a running task"),
        "_context": Private("", "what the result backend wants to know of a request"),
        "_payload": Private("", "callbacks, chain and chord of a message"),
    },
    "kombu.asynchronous.hub:Hub": {
        "_pop_ready": Private("(self)", "acknowledgements while the pool stops and the event loop does not turn"),
    },
    "kombu.common:QoS": {
        "_mutex": Private("", "the count changes under kombu's own lock"),
    },
    "kombu.message:Message": {
        "_decoded_cache": Private("", "the body that the gate has read is not decoded again"),
        "_reraise_error": Private("(self, callback=None)", "a refused message keeps nothing alive"),
    },
    "kombu.messaging:Producer": {
        "_channel": Private("", "whether the channel collects messages, to send several together"),
    },
    "kombu.transport.redis:Channel": {
        "_brpop_read": Private("(self, **options)", "the wait removes no message, so its reply contains none"),
        "_brpop_sent_at": Private("", "kombu's check for a wait without a reply"),
        "_brpop_start": Private("(self, timeout=None)", "wait for a message without removing it"),
        "_closing": Private("", "a channel that is closing takes no messages"),
        "_connparams": Private("(self, asynchronous=False)", "sentinels; errors that name damaged keys"),
        "_expires": Private("", "answers to control commands expire"),
        "_fanout_queues": Private("", "what is published to all is never in the ledger"),
        "_flush_brpop_reauth": Private("(self)", "what kombu does at the end of `_brpop_read`"),
        "_get_message_priority": Private(
            "(self, message, reverse=False)", "the list of a message that is put once"
        ),
        "_handle_message": Private("(self, client, r)", "a broadcast passes the gate before it is parsed"),
        "_in_poll": Private("", "what kombu does at the end of `_brpop_read`"),
        "_put": Private(
            "(self, queue, message, **kwargs)",
            "what follows the end of a task is put once; answers to control commands expire",
        ),
        "_q_for_pri": Private("(self, queue, pri)", "the lists of a queue, by priority"),
        "_queue_cycle": Private("", "the order of queues: fair shares of tenants"),
        "_update_queue_cycle": Private("(self)", "the queues that models share come last"),
        "_receive_one": Private("(self, c)", "a control command that fails must not end the worker"),
        "_size": Private("(self, queue)", "the length of a queue with a damaged list"),
    },
    "kombu.transport.virtual.base:Channel": {
        "_next_delivery_tag": Private("(self)", "random bytes for each message take time"),
    },
    "kombu.transport.virtual.base:Message": {
        "_raw": Private("", "a refused message keeps nothing alive"),
    },
    "kombu.transport.virtual.base:QoS": {
        "_delivered": Private("", "which messages are held"),
        "_dirty": Private("", "which messages are acknowledged"),
    },
    "kombu.transport.virtual.base:Transport": {
        "_callbacks": Private("", "whether a queue has a consumer"),
        "_deliver": Private("(self, message, queue)", "pass a message to its consumer"),
    },
    "redis.connection:AbstractConnection": {
        "_connect": Private("(self)", "ask the sentinels before each connection"),
        "_sock": Private("", "wait at the socket without a lock; close it in a forked child"),
    },
}
"""The private names, by the class or module that defines them."""


def install() -> None:
    for patch in PATCHES:
        patch.install()
