"""The requests and results of tasks: for all rooms of `tasks`.

From `delay` to the engine a request passes four checks, and each alone checks something:

1. Submission: `messages.check_submission` checks Celery's options, such as `countdown`; `schemas.validate` checks
   the task's options, so that the caller learns at once what is wrong.
2. Gate (`worker/broker/gate`): checks that the message is well-formed, so that nothing in it ends a worker.
3. Intake: `schemas.validate` again, because a message may come from another version, from `send_task` or from a
   chain.
4. Preparation (`gpu_worker/threads/preparation`): checks the limits that only the model has, such as vocabulary,
   context, pages and template. An engine may be used without Celery, so preparation also checks the limits of
   `petiole.limits`.

schemas         requests as pydantic models. A new option is declared here
results         deltas and results as pydantic models
counting        request and result of `count`
kinds           by a task's name, the schema of its request
skills          requests to a vision model (query, caption, point, detect) and of texts (embed, rerank, score,
                classify)
choices         which tools a conversation may call: `tool_choice`
images          an image in a request: base64, a data URL or a handle
types           the same as TypedDicts, for type checkers and editors: written by `python -m docs.render`
celery_options  the options of Celery that `delay` takes, such as `priority`
messages        the rules for a message's headers: for producers and a worker's gate. A new rule goes here
hints           what to write in place of an option that a task does not have
names           the names of the tasks in messages
affinity        which tasks should run on one worker: the header with their key
"""
