"""The Celery app and its configuration: for producers and workers alike.

application    the app and its configuration, made at its first use; it turns a worker into Petiole's
backend        the result backend on Redis, one for all threads
awaiting       how callers wait for results: one subscription a process
control        Celery's broadcasts, with one connection in place of two
rabbitmq       quorum queues and delays on RabbitMQ
signatures     `generate.s(...)`: it carries its queue, for workers of another app
stored_errors  the module name of stored errors, the same for every version; their class: `worker.output.outcomes`
two_apps       what this app and a user's must have in common, said where a canvas of both is submitted
"""
