"""Who comes first, and who gives way to whom: decisions for `planning`, and the queue that they wait in.

preemption   rows and pages, when they run out
draft_price  time: how many tokens a draft costs
budget       time: what the lowest priority class may add to a step of more urgent sequences
admission    the waiting queue, adapter slots, images on their way to crops
"""
