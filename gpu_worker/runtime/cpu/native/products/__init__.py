"""Linear maps on a CPU. The structures of Python mirror those of C. Called by `stack` and `layers/`.

choice       measures whether the C kernels or torch's library multiply
adapters     what LoRA adapters add to the maps of a mixed batch
library      torch's own products of the same weights
linear       a map's panels among the threads, and what becomes of the sums
weights      tensors as `packed/` rearranges them
gguf_blocks  what becomes of a GGUF file's blocks
kernels/     the sums of a panel
packed/      how weights lie in memory
"""
