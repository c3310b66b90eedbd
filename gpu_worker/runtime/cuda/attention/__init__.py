"""Paged attention on CUDA, behind `models.decoder.Attention`. A new attention kernel goes here;
`executor` (steps that are launched), `graphs` (captured steps) and `runtime` (norms, activation) name the one in use.
What a kernel requires of a model, and the memory that it needs: `executor`.

flashinfer  all of FlashInfer that is used: attention, and a layer's norms and activation
installed   whether the FlashInfer that is installed can be relied on
"""
