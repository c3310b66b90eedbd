"""What follows the end of a task, once. Called by `generation`.

backend     the worker's result backend: counts a task once in its chord
claims      decides who completes a task, so that links are sent and results are stored once
threads     the threads that run Celery's trace, and store small results together
completion  completes one task, step by step: talks to Celery and to its result backend
reports     the messages of a completion to its job
standby     watches a task that another delivery has, while this worker holds a message of it
lua/        claim: links and results once, after the stream has ended; count; started; store; retire
"""
