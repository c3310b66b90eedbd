"""OpenAI's batches, over `tasks.submission.batches`.

lines  OpenAI's batch lines, as a form of `petiole batch`
"""
