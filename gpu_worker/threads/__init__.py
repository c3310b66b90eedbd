"""The threads of an engine. Started by `engine`.

preparation  validates a request, tokenizes it and builds its sequence
intake       the way in: from `submit` to the engine thread
prompts      a prompt's tokens, values and images, checked
loop         the engine thread: launch, sample, commit
text         the text thread: text, stop strings, deltas, ends
pool         a minimal thread pool, which `tasks.worker` uses as well; not Celery's pool
"""
