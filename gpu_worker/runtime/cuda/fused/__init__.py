"""Triton kernels that FlashInfer lacks. Imported on CUDA only, where Triton comes with torch.

Each module has kernels and functions that launch them. The tests run them in Triton's interpreter on a CPU.

    layers     norm, rotation and storing of keys and values in one launch; a step's page list; eight-bit values
    norms      norms whose weights are in float32, or that a gate follows
    choose     from logits to tokens in two launches
    accept     verification of drafts in one launch
    adapters   adds each position's own adapter
    experts    mixtures of experts
    routing    which experts each position takes, and the pairs of both in the order of experts
    split/     decode attention over rows that are cut along their keys
    linear/    products with weights of 16 bits, and with codes
    states/    layers that keep a state
"""
