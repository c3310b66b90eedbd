"""The tasks `generate` and `chat`, from `delay` to the message; and how their bodies get their results.

Each line may import what stands below it.

definitions  `generate` and `chat` themselves; importing them costs little
task         what `delay`, `apply_async` and `stream` do: check, route, send
signatures   `generate.s(...)`: it carries its queue, for workers of another app
parsing      a message's arguments as a request, with the result of the task before it in a chain
handover     how a task's body gets its result from the worker that runs it; not the `handoff` of a shutdown
"""
