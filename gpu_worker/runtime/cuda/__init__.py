"""CUDA's forward. Called by `runtime`.

executor    a captured graph for decode steps, one eager pass for all others
graphs      decode steps as CUDA graphs
encoder     a vision encoder's steps as CUDA graphs
attention/  paged attention
deltas      what adapters add to a captured step
fused/      Triton kernels that FlashInfer lacks
"""
