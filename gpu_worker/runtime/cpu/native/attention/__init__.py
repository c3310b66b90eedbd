"""Attention over the paged KV cache. C alone. Called by `layers/`.

attend   a span of queries at some heads, block by block
few      the products of a few queries, which read keys and values in place
blocks   a block of the cache, and its keys and values packed for many queries
softmax  from scores to weights
spans    how a step is cut: spans of positions, units of heads
scratch  a thread's memory, and how much it computes at a time
heads    the attention of one layer: its heads, and where its keys and values lie
"""
