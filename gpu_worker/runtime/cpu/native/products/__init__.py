"""Linear maps on a CPU. The structures of Python mirror those of C. Called by `stack` and `layers/`.

adapters     what LoRA adapters add to the maps of a mixed batch
linear       a map's panels among the threads, and what becomes of the sums
weights      tensors as `packed/` rearranges them
gguf_blocks  what becomes of a GGUF file's blocks
kernels/     the sums of a panel
packed/      how weights lie in memory
"""
