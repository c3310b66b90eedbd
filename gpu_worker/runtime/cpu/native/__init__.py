"""The CPU's own forward: C, compiled on the machine that runs it or with its image, and optional everywhere.
Called by `executor`.

build        compiles the C files, once on each machine or when an image is made
forward      a decoder over a KV pool
encoder      the encoder of crops, computed by the same code
stack        a plan's layers over a memory of keys and values, as `layers/` computes them
drafting     the layer that drafts: its inputs, and which calls hold the interpreter
supported    the plans that the C code computes
draw         the Gumbel maximum of sampling
layers/      a step from inputs to logits: one call
attention/   attention over the paged KV cache
recurrent/   mixers that keep a state
products/    linear maps: weights, the kernels that multiply, and which of them are chosen
arithmetic/  vectors, and functions of them
"""
