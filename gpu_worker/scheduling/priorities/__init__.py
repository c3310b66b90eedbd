"""Who gives way to whom: decisions for `planning`.

preemption   rows and pages, when they run out
draft_price  time: how many tokens a draft costs
budget       time: what the lowest priority class may add to a step of more urgent sequences
"""
