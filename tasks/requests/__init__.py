"""What a task is asked, and what it answers: for all rooms of `tasks`.

schemas     requests, deltas and results as pydantic models, and their keys in Redis. A new option is declared here
skills      requests to a vision model: query, caption, point, detect
kinds       by a task's name, what it takes
images      an image in a request: base64, a data URL or a handle
types       the same as TypedDicts, for type checkers and editors: written by `python -m docs.render`
submission  the options of a submission, such as `priority`
messages    what a message's headers may say: for producers and a worker's gate. A header's rule goes here
hints       what to write in place of an option that a task does not have
names       the names of the tasks in messages
affinity    which tasks should run on one worker: the header that says so
"""
