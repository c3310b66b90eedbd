"""Through Celery and Redis.

batch         `petiole.batch` beside a hand-made loop and a Celery group
redis_cost    the cost of a task and of a delta for Redis
serving       a real worker with readers, against the same engine driven directly
queued_texts  vectors of texts, against the same engine alone
celery_noop   one-token generations, against Celery's no-op task
latency       from `delay()` until a reader has the first delta
submission    submissions from one process, and while the broker is away
transport     the Redis transport, against kombu's own
reliability   with log, fencing and leases, and without
recovery      a worker is killed or deployed in mid-sentence
traces        what the spans of a task cost
affinity      conversations on a fleet
"""
