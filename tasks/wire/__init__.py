"""What Petiole writes into Redis and into messages. Workers and producers of two versions must read it alike.

record/    what stands in Redis of one task: deltas and ends as JSON, the scripts that write them
messages/  the headers of a task's message: their rules, and the key of affinity
keys       every name that Petiole writes into Redis or into a message
"""
