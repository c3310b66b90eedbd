"""Attention over the paged KV cache. C alone. Called by `layers/`.

attend   a span of queries at some heads, block by block
few      the products of a few queries, which meet keys and values where those lie
blocks   a block of the cache, and its keys and values laid out for many queries
softmax  from scores to weights
spans    how a step is cut: spans of positions, units of heads
desk     a thread's memory, and how much is met at a time
heads    the attention of one layer: its heads, and where its keys and values lie
"""
