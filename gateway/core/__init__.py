"""What is pure: no input, no output, no clock.

    caller          who asks: a tenant, by one of its keys; what its tasks have in common: salt, priority, name
    requests        what the requests of all interfaces share
    record          what was asked, and which tasks answer it: the other half of an answer is their logs
    task_plan       what a request becomes: a record, and the tasks to submit
    parts           what an output is made of: parts that open, get text, and close; its end
    text_offsets    at which character a token's log-probabilities are, of outputs and of prompts
    foreign/        what clients of other servers send: ignored, refused, translated
    assembly        a task's deltas as parts
    webhook_events  what a webhook is told, and its signature
    events          events, their numbers, and what is left of them after a number
    streams         deltas in, numbered events as bytes out, by a view
    failures        what a client is told of an error: status, code, the field it is about

**Numbers.** A sequence number counts emitted characters and structural events, one each, from 0. An event has the
number of its last one. So numbers depend on what was generated and not on how it fell into deltas, and a client
that comes back with any number gets exactly the rest: an event that has the number in its middle is split there.

**Causal.** What was emitted is never taken back or read in another way. What cannot be decided yet is held back
until more text decides it, or the end of the log. Time decides nothing.
"""
