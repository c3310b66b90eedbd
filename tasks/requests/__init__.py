"""What a task is asked, and what it answers: for all rooms of `tasks`.

From `delay` to the engine a request passes four checks. Each of them alone checks something:

    submission   `messages.check_submission`: Celery's options, such as `countdown`. `schemas.validate`: the task's
                 options, so that the caller learns at once what is wrong
    gate         `worker/broker/gate`: whether the message is one, so that nothing in it ends a worker
    intake       `schemas.validate` again: a message may come from another version, from `send_task` or from a chain
    preparation  `gpu_worker/threads/preparation`: what only the model knows (vocabulary, context, pages, template).
                 An engine may be used without Celery, so it also checks the limits that `petiole.limits` declares

schemas     requests, deltas and results as pydantic models. A new option is declared here
types       the same as TypedDicts, for type checkers and editors: written by `python -m docs.render`
submission  the options of a submission, such as `priority`
messages    what a message's headers may say: for producers and a worker's gate. A header's rule goes here
hints       what to write in place of an option that a task does not have
affinity    which tasks should run on one worker: the header that says so
"""
