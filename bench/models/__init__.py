"""Models on the CPU, beside other engines.

__main__    `python -m bench.models`
mixtures    decode steps of mixtures of experts, and of models with states
decoding    decode and prefill
batching    a whole load at once
files       a GGUF file: loading, memory, decode
vision      questions about pictures
embeddings  vectors and scores of texts
"""
