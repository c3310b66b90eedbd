"""Paged attention on CUDA, behind `models.decoder.Attention`. A new attention kernel goes here.

The kernel in use is named in `graphs` (captured steps), `executor` (all other steps) and `runtime` (norms,
activation). `executor` also has the kernel's requirements of a model, and the memory that it needs.

latents     attention over latents, by a wrapper of FlashInfer's own
flashinfer  the parts of FlashInfer that are used: attention, and a layer's norms and activation
split       captured decodes of rows that are cut along their keys, by kernels of our own
installed   whether the installed FlashInfer can be relied on
"""
