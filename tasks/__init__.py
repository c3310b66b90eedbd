"""Petiole's producer side: submit generations to Celery, and read their streams.

Importing this package reads no settings, connects to nothing, and needs neither torch nor numpy.
"""

from tasks.app import app as celery_app

__all__ = ["celery_app"]
