"""Triton kernels for what FlashInfer has none for: imported on CUDA only, where torch brings Triton along.

Each module has the kernel and one function around it; the tests run them in Triton's interpreter on a CPU.
"""
