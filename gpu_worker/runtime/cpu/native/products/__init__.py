"""Linear maps on a CPU. The structures of Python mirror those of C. Called by `stack` and `layers/`.

choice    measures whether the C kernels or torch's library multiply
adapters  what LoRA adapters add to the maps of a mixed batch
library   torch's own products of the same weights
linear    a map's panels among the threads, and what becomes of the sums
groups    the sums of weights with scales by group, of inputs in bfloat16
floats    the same of inputs that are floats, or were rounded
slices    how both of them compute a panel
codes     how the codes of these lie in memory, and what they stand for
panels    the sums of 32 outputs, or of 64
tiles     the same on AMX's tiles
pack      how weights lie in memory, and how they come there
weights   tensors as `pack` rearranges them
matrix    a map, and a thread's memory for its products
"""
