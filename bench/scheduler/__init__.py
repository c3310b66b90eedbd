"""The scheduler and the caches without tensors, and fleets on paper.

__main__    `python -m bench.scheduler`
policies    prefill policies with an H200's step time
day         workers that come and go with a day's work, on the simulated fleet
simulate    a fleet: the real scheduler with a timed model
steps       how long the steps of an engine take under load, and the model of it
costs       a step's plan, launch and commit, with nothing computed
overlap     pipelined against blocking, with a device that only keeps time
cache       prefix caches and the page table
cache_peer  the peer of `cache`: one Python object for each token
"""
