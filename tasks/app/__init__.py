"""The Celery app and its configuration: for producers and workers alike.

application      the app, configured at its first use; it turns a worker into Petiole's
configuration    Petiole's settings as Celery's configuration; how long callers try; the routes of tenants
backend          the result backend on Redis, one for all threads
result_consumer  how callers wait for results: one subscription for each process
thread_executor  threads for calls that block, for callers of asyncio
redis_transport  what this app does as a client: messages of several callers in one round trip, confirmation by
                 replicas; control commands
amqp             how queues are declared and listed, and messages made; quorum queues and delays on RabbitMQ;
                 connections and producers of this app alone, in each process; what fails submissions at once
                 while the broker is known to be away
worker_side      the names of the worker's classes, as dotted strings
stored_errors    the module name of stored errors, the same for every version; their class:
                 `worker.output.outcomes`
interop          which app is the user's; checks what both must have in common when a canvas of both is submitted;
                 waits for a group of both: the one method of Celery's that producers replace
"""
