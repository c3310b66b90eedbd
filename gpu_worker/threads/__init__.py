"""The threads of an engine. Started by `engine`.

preparation  validates a request, tokenizes it and builds its sequence
intake       the way in: from `submit` to the engine thread
prompts      checks a prompt's tokens, values and images
subjects     turns a prompt, messages or a skill call into a prompt's tokens
cutting      leaves tokens of a prompt out that is too long, where its request says so
pictures     from an image's file to a picture: formats, limits, rules
asking       what requests of texts ask: checks them, tokenizes their texts
texts        a request of many texts: a request for each, and what is made of them in order
pairs        two texts as the tokens that a model gives a score to
loop         the engine thread: launch, sample, commit
text         the text thread: text, stop strings, deltas, ends
pool         a minimal thread pool, which `tasks.worker` uses as well; not Celery's pool
"""
