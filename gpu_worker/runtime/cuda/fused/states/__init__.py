"""Layers that keep a state.

recurrent  convolutions, what delta rules read, and the rules position by position
chunks     the delta rule of long rows, with products of matrices
fla        the same by fla-core, an optional package
"""
