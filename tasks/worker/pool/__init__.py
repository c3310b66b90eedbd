"""Celery's pool interface. Called by Celery.

pool            `EnginePool`: one engine and its jobs; ends the worker after a fatal error
shutdown        SIGTERM: tasks finish in time, or are handed back to the queue
foreign_tasks   tasks of the application's own, on threads
commands        control commands: which are carried out, and where their answers go
engine_control  `petiole pause`, `resume` and `reload`: commands about the engine of a running worker
"""
