"""Which step is next, and who is in it. Each line may import what stands below it.

planner     chooses between prefill and decode; the sequences of a decode
prefill     the chunks of a prefill, or the images that they need
drafts      who gets how many drafts, and who waits for those in flight
relief      who gives way when pages or rows are short
candidates  which waiting sequences may start; who needs how many pages, and gets them
"""
