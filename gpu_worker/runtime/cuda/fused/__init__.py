"""Triton kernels that FlashInfer lacks. Imported on CUDA only, where Triton comes with torch.

Each module has kernels and functions that launch them. The tests run them in Triton's interpreter on a CPU.

    layers     norm, rotation and storing of keys and values in one launch; a step's page list; eight-bit values
    products   linear layers of small batches, with the norms and activations around them
    choose     from logits to tokens in two launches
    accept     verification of drafts in one launch
    norms      norms whose weights are in float32, or that a gate follows
    grouped    products with codes, and with the layers of experts
    codes      how codes become numbers
    experts    mixtures of experts
    routing    which experts each position takes, and the pairs of both in the order of experts
    recurrent  layers that keep a state: convolutions, what delta rules read, and the rules position by position
    chunks     the delta rule of long rows, with products of matrices
    adapters   adds each position's own adapter
"""
