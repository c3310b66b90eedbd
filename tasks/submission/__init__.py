"""The tasks, from `delay` to the message; and how their bodies get their results.

Each line may import what stands below it.

batches/           `batch`: many rows as many tasks, each exactly once
definitions        `generate`, `chat`, `query` and the others themselves; cheap to import
typed              the options of each task, for type checkers: written by `python -m docs.render`
embed_many         `embed.many`: any number of texts, as tasks of some texts each
put_image          `put_image`: an image stored once, for many questions
task               what `delay`, `apply_async` and `stream` do: check, route, send; how a body gets its result. One
                   of their options, such as `priority`, begins in `contract.requests.submission`
message_templates  messages without Celery's work for each, for `delay`, `adelay` and the gateway
bundles            such messages on their way: those that wait together are sent together
counting           `count`: its queue, its result
signatures         `generate.s(...)`: it carries its queue, for workers of another app
options            the options apart: the request's and the submission's; the queue of a model, the key of
                   affinity; a message's arguments, and the result of the previous task in a chain, as a request
"""
