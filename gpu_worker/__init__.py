"""The engine: scheduling, runtime, models. It knows no Celery and no Redis."""
