"""Who gives way to whom: decisions for `planning`.

preemption  rows and pages, when they run out
recent      time: how long the steps of the lowest priority class are while others come and go
draft_price time: how many tokens a draft costs
budget      time: what the lowest priority class may add to a step of more urgent sequences
"""
