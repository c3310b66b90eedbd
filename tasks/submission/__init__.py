"""The tasks, from `delay` to the message; and how their bodies get their results.

Each line may import what stands below it.

definitions  `generate`, `chat`, `query` and the others themselves; importing them costs little
typed        what each task takes, for type checkers: written by `python -m docs.render`
images       `put_image`: an image stored once, for many questions
task         what `delay`, `apply_async` and `stream` do: check, route, send. One of their options, such as
             `priority`, begins in `requests.celery_options`
signatures   `generate.s(...)`: it carries its queue, for workers of another app
parsing      a message's arguments as a request, with the result of the task before it in a chain
handover     how a task's body gets its result from the worker that runs it; not the `handoff` of a shutdown
"""
