"""Other engines behind the same pool, on the floor of `petiole.gpu_worker`: they know no Celery and no Redis.

vllm/  vLLM's engine, in a process with an interpreter of its own

Each has what `Serving` has, and so what a worker asks of an engine. `docs/engines.md` says what differs.
"""
