"""What a layer is made of: for each part its weights, and what it computes with a plan. The decoder puts them
together.

layered       encoders, as code that computes their layers itself sees them
layer         a layer's weights, and those of a head that drafts
recurrent/    mixers that keep a state
attention     queries, keys and values, or latents, and what stands between them and the attention of a step
per_layer     the per-layer inputs of Gemma 4
experts       mixtures: feed-forwards of which a position takes a few
routing       which experts a position takes, and how much each counts
feed_forward  gates and activations. A new activation goes here
pooling       from the hidden states of a text to its vector
norms         norms of all kinds. A new kind goes here
rotary        tables of rotations, and rotating. A new kind goes here; `families/config_keys` knows its keys
kernels       what a device computes in one pass
"""
