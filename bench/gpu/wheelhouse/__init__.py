"""What a CUDA machine without internet needs beside torch.

__main__    `python -m bench.gpu.wheelhouse FOLDER`
collecting  downloads and trims the wheels
kernels     compiles FlashInfer's kernels ahead
"""
