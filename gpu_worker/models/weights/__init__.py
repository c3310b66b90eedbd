"""How the weights of linear layers are stored, behind one interface. A new format is a class and a way to read it.

copying       copies tensors from their source onto the device: whole, joined, as stored, or in eight bits
description   formats of the weights in memory, for operators
source        a checkpoint as the source of tensors and of quantised layers
fused         experts that a checkpoint stores in one tensor, as a layer each
stacked       layers of one size, one after the other
formats/      readers of quantised checkpoints, one a format
quantization  plain weights as four-bit codes
quantized     the one form of quantised weights, and the `Linear` that computes every such form
linear        `Linear`, and a class for each way to store its weights
threads       work in parts, each on one thread
names         where a checkpoint keeps the parts of a plan, and which products adapters change
host_memory   large tensors on the host, in large pages
"""
