"""Vectors of 16 lanes, and what all kernels compute with. C alone.

functions  exponentials and activations
erf        gelu from a table
e4m3       floats in eight bits
arena      sizes, and memory that is taken piece by piece
vectors    the compiler's vectors, and the instructions that processors have for them
"""
