"""What follows the end of a task, once. Called by `generation`.

claims    who completes a task, and whether that is done: sends links and stores results once
threads   the threads that run Celery's trace, and store small results together
completion  completes one task, step by step: talks to Celery and to its result backend
reports   what a completion tells its job
standby   watches a task that another delivery has, while this worker holds a message of it
started   stores STARTED, but never over a final state
lua/      claim: links and results once, after the stream has ended; started; store
"""
