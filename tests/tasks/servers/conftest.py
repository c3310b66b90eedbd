"""The redis-server of the worker's tests."""

from tests.tasks.worker.conftest import client, server

__all__ = ["client", "server"]
