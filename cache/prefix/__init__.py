"""The prefix caches. Called by `allocation`.

interface    what a prefix cache does; the one that caches nothing
factory      creates the cache that the configuration names
radix        a radix tree over tokens, for pages of one token
tree         its nodes: split and join
block_cache  full blocks by chained hashes
accounting   what both caches count: look-ups, pages, the limit of their size
eviction     who is evicted first; for `groups`, too
"""
