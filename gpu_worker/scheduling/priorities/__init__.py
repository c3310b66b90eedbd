"""Who comes first, and what others cost them: decisions for `planning`, and the queue that they wait in.

draft_price  time: how many tokens a draft costs
budget       time: what the lowest priority class may add to a step of more urgent sequences
admission    the waiting queue, deadlines, adapter slots, images on their way to crops
"""
