"""What a task answers.

task_result  deltas of a stream, ends and results as pydantic models
outputs      the parts of an output that the engine makes, and `tasks` writes and reads
vectors      vectors of texts as results carry them
"""
