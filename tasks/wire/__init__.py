"""What Petiole writes into Redis and into messages. Workers and producers of two versions must read it alike.

record/  what stands in Redis of one task: deltas and ends as JSON, the scripts that write them
headers  the rules for the headers of a task's message: for producers, and for a worker's gate. A new rule goes
         here
keys     every name that Petiole writes into Redis or into a message
"""
