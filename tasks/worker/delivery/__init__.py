"""One message that Celery has delivered. Called by `pool`, `generation`, `completion` and `foreign_tasks`.

delivery       one message, as Celery passes it to the pool, and the ways to settle it; all that a task has here;
               time limits, and Celery's request with its `revoke`: a revoked task ends in its stream first
attempt_spans  the spans of a task's attempts, for traces
mailbox        callbacks for the consumer's thread, which alone may change Celery's state
"""
