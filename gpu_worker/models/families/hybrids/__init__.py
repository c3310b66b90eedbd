"""Decoders of which most layers keep a state, and some attend. Beside the families:

mamba   what families with Mamba-2 refuse alike
"""
