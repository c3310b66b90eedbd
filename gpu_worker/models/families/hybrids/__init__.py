"""Decoders of which most layers keep a state, and some attend."""
