"""The headers of a task's message.

headers   the rules for headers: for producers, and for a worker's gate. A new rule goes here
affinity  which tasks should run on one worker: the header with their key
"""
