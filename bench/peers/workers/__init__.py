"""Celery workers as people write them today.

starting      starts them on our embedded Redis
plain_celery  the tasks
model_server  a model behind HTTP, for tasks that call one
"""
