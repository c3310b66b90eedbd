"""The worker side: the only part of Petiole that imports both Celery and the engine.

Each line may import what stands below it. Nobody above imports any of it: Celery resolves the names in
`tasks.worker_side`.

    boot/        makes a Celery worker Petiole's: configuration, bootstep, exit, log
    pool/        Celery's pool interface: takes what Celery delivers, and hands back what is left at shutdown
    generation/  one task on its way through the engine: begin its attempt, submit, end
    completion/  what follows the end, once: links, results, STARTED; waiting for another delivery
    delivery/    one message: what Celery passes to the pool, and how it is settled
    broker/      messages on Redis: take, own, lease, set aside
    reports/     a worker's reports on itself: to `petiole status`, Prometheus and its supervisor
    output/      the outgoing half of the streams, and outcomes
    idempotency  what follows the end of a task happens once, however often it is tried
    outage       logs the first failure of something, and the recovery
    periodic     a thread that repeats one function
    scripts      the Lua scripts in `lua/` beside their callers; a connection for calls in a pipeline
"""

from importlib.util import find_spec

from petiole.tasks.app.worker_side import PackagesMissingError

if missing := [package for package in ("hiredis", "petiole.gpu_worker") if find_spec(package) is None]:
    raise PackagesMissingError(missing)
