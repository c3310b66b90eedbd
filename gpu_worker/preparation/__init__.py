"""What happens to a request before it may run, on the threads that `engine.open_requests` starts. Each line
may import what stands below it.

preparation  validates a request, tokenizes it and builds its sequence
prompts      turns a prompt, messages or a skill call into a prompt's tokens
infill       prompt and suffix as one prompt, for models that fill in what is between
skills       skill calls as conversations; points and boxes from JSON that a schema describes
embeddings   checks requests for embeddings and scores by what the model does, and tokenizes their texts
pairs        two texts as the tokens that a model gives a score to
truncation   leaves tokens of a prompt out that is too long, where its request says so
tokens       checks a prompt's tokens, values and images, and refuses what is too long
output       where a request's output is collected, from its preparation on
videos       from frames, or a video's file, to images and to what is written for them
images       from an image's file to a picture: formats, limits, rules
"""
