"""Triton kernels that FlashInfer lacks: imported on CUDA only, where torch brings Triton along.

Each module has the kernel and one function around it; the tests run them in Triton's interpreter on a CPU.

    layers    norm, rotation and storing of keys and values in one launch; a step's page list; eight-bit values
    products  linear layers of small batches, with what precedes and follows them
    choose    from logits to tokens in one launch
    adapters  what adapters add, each position from its own
"""
