"""Mixers that keep a state (`models/parts/recurrent`). Called by `layers/` and `stack`.

recurrent    what a step makes of the inputs of all its positions, and of the states
rules        the gated delta rule and the scan of Mamba-2, position by position
convolution  a causal convolution of each channel
stretches    the neighbouring positions of one row in a step
structures   a mixer as `recurrent.h` lays it out, in Python
"""
