"""The CPU's own forward: C, compiled on the machine that runs it, and optional everywhere. Called by `executor`.

build     compiles the C files, once on each machine
forward   a decoder's weights and KV pool as `decoder.c` sees them
products  measures whether the C kernels or torch's library multiply
library   torch's own products, as `library.c` calls them
weights   tensors as `matrix.c` reads them
adapters  adapters as `adapters.c` reads them
draw      the Gumbel maximum of sampling, in `draw.c`
"""
