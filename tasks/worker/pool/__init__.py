"""Celery's pool interface. Called by Celery.

pool     `EnginePool`: one engine and its jobs
handoff  SIGTERM: tasks finish in time, or are handed back to the queue
"""
