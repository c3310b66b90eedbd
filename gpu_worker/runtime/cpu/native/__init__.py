"""The CPU's own forward: C, compiled on the machine that runs it or with its image, and optional everywhere.
Called by `executor`.

build     compiles the C files, once on each machine or when an image is made
levels    the processors for which an image brings them compiled
forward   a decoder over a KV pool, computed by `decoder.c`
encoder   the encoder of crops, computed by the same code
stack     layers, and their memory of keys and values, as `decoder.c` sees them
products  measures whether the C kernels or torch's library multiply
library   torch's own products, as `library.c` calls them
weights   tensors as `matrix.c` reads them
adapters  adapters as `adapters.c` reads them
draw      the Gumbel maximum of sampling, in `draw.c`
"""
